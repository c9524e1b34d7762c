"""Pure functions behind the trainers: MaxEnt weights on tensors, controllers on floats. Nothing here knows TRL."""
