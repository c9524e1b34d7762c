"""The mathematics of the objectives, independent of TRL: MaxEnt weights, and controllers of beta and tau."""
