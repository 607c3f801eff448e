"""What all parts of the runtime use: tensor functions, balancing, metrics and the clock."""
