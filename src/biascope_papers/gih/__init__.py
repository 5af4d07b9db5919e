"""The paper of the geometric invariance hypothesis (GIH): one file per figure, shared set-up in files with a name."""
