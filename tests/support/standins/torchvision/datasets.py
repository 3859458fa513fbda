from tests.support.lookalikes import ImageFolder as ImageFolder
