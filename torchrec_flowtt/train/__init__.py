"""The training job: ``python -m torchrec_flowtt.train`` and ``flowtt train``."""
