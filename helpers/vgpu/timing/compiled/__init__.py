"""What torch.compile makes of a program, in virtual time."""
