"""Studies of the chapter on KFAC and EKFAC."""
