"""Studies of the model's parts: subclasses and replaced functions, outside the packages that they study."""
