"""Bad input: refused at the call, or told to both sides; never a lasting effect."""
