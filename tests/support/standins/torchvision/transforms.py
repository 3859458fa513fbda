from tests.support.lookalikes import Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop, ToTensor

__all__ = ["Compose", "Normalize", "RandomHorizontalFlip", "RandomResizedCrop", "ToTensor"]
