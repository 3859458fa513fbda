"""torch's DataLoader with batches in reusable shared memory."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs={"dataloader": ["DataLoader"]})
