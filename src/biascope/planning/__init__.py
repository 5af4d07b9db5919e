"""What a computation will take, before it is started: memory, time, traffic, on one process or many."""

__all__: list[str] = []
