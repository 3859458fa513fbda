from tests.lookalikes import Compose as Compose
from tests.lookalikes import Normalize as Normalize
from tests.lookalikes import RandomHorizontalFlip as RandomHorizontalFlip
from tests.lookalikes import RandomResizedCrop as RandomResizedCrop
from tests.lookalikes import ToTensor as ToTensor
