from tests.support.lookalikes import Compose as Compose
from tests.support.lookalikes import Normalize as Normalize
from tests.support.lookalikes import RandomHorizontalFlip as RandomHorizontalFlip
from tests.support.lookalikes import RandomResizedCrop as RandomResizedCrop
from tests.support.lookalikes import ToTensor as ToTensor
