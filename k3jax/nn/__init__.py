"""The K3 text model as Flax NNX modules used strictly as pytrees; one file for each mechanism."""
