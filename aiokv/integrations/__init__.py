"""aiokv inside other engines: each folder imports the engine that it is named after, when it is used."""
