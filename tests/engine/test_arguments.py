"""What callers pass: checked, and put into the form that the layers below use."""
