"""biascope shows the inductive bias of any PyTorch network."""

__version__ = "0.1.0.dev0"
