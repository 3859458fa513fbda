from tests.lookalikes import ImageFolder as ImageFolder
