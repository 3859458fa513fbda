"""Small datasets with the shapes of programs that people publish: where they read, where they draw.

`SHAPES` says what becomes of each. Each has `N` samples. Files are pictures of 24 x 24, arrays,
waves and texts.
"""

# ruff: noqa: SIM201

import contextlib
import copy
import functools
import io
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, get_worker_info

from stocache.datasets.cut.program import Program
from stocache.errors import SampleError
from stocache.samples.record_decoder import pack_sample

N, SIDE = 12, 24
scale = 1
"""How many times as large pictures and arrays are; set it before they are written."""


def random_of(number, *shape, high=256, dtype=np.uint8):
    return np.random.RandomState(number).randint(0, high, shape).astype(dtype)


def files(folder, name, ending, write):
    """Write files by a function of a path and a seed, and return their paths."""
    (folder / name).mkdir(parents=True)
    paths = [folder / name / f"{number:02}.{ending}" for number in range(N)]
    for number, path in enumerate(paths):
        write(path, number + len(name))
    return list(map(str, paths))


def pictures(folder, name="pictures", mode="RGB", side=SIDE):
    make = lambda seed: Image.fromarray(random_of(seed, side * scale, side * scale, 3)).convert(mode)
    return files(folder, name, "png", lambda path, seed: make(seed).save(path))


masks = functools.partial(pictures, name="masks", mode="L")
small = functools.partial(pictures, name="small", side=SIDE // 2)


def arrays(folder, name="arrays", shape=(SIDE, SIDE)):
    make = lambda seed: random_of(seed, *(size * scale for size in shape), dtype=np.float32)
    return files(folder, name, "npy", lambda path, seed: np.save(path, make(seed)))


def texts(folder, name="texts", columns=4):
    """Write lines of numbers, and return the paths."""
    make = lambda seed: random_of(seed, 32 * scale, columns) / 8
    return files(folder, name, "txt", lambda path, seed: np.savetxt(path, make(seed), fmt="%.3f"))


def archives(folder):
    make = lambda seed, high: random_of(seed, SIDE * scale, SIDE * scale, high=high)
    write = lambda path, seed: np.savez(path, picture=make(seed, 256) / 256, label=make(seed, 4))
    return files(folder, "archives", "npz", write)


def boxes(_=None):
    return [[{"box": [1.0 + number, 2.0, 6.0, 8.0], "kind": number % 3} for _ in range(1 + number % 3)] for number in range(N)]


def read(path):
    return np.asarray(Image.open(path)).copy()


def read_wave(path):
    """Return a wave and its rate."""
    return np.load(path).ravel() / 256, 16000


def read_numbers(path):
    return np.loadtxt(Path(path).read_text().splitlines())


def decoded(data):
    return np.asarray(Image.open(io.BytesIO(data))).astype(np.float32) / 255


def to_tensor(picture):
    pixels = np.asarray(picture)
    return torch.from_numpy(np.ascontiguousarray(pixels[..., None] if pixels.ndim == 2 else pixels)).permute(2, 0, 1) / 255


def resized(picture, side=16):
    return np.asarray(Image.fromarray(picture).resize((side, side)))


def cropped(size, *pictures):
    """Draw a window, and return it of each picture."""
    top, left = random.randint(0, pictures[0].shape[0] - size), random.randint(0, pictures[0].shape[1] - size)
    return [each[top : top + size, left : left + size] for each in pictures]


def augmented(pictures):
    flip, turns = random.random() < 0.5, random.randrange(4)
    return [np.rot90(each[:, ::-1] if flip else each, turns) for each in pictures]


class Compose:
    """Calls its steps with all parts of a sample."""

    def __init__(self, *steps):
        self.steps = steps

    def __call__(self, *parts):
        for step in self.steps:
            parts = step(*parts) if len(parts) > 1 else (step(*parts),)
        return parts if len(parts) > 1 else parts[0]


class Flip:
    """Flips all parts alike."""

    def __init__(self, p=0.5):
        self.p = p

    def __call__(self, *parts):
        if random.random() < self.p:
            parts = tuple(np.ascontiguousarray(np.asarray(part)[:, ::-1]) for part in parts)
        return parts if len(parts) > 1 else parts[0]


def flipping(_=None):
    return Compose(Flip(), to_tensor)


class Shape(NamedTuple):
    """A shape of programs.

    Attributes:
        make: writes files into a folder, and returns the dataset.
        expected: "cut", "cut, hoisted" (statements after the first that draws are cached as well), "cached" or "uncached".
        again: how many files each sample opens after the first draw, at most.
    """

    make: Any
    expected: str = "cut"
    again: int = 0


SHAPES: dict[str, Shape] = {}


def shape(name, expected="cut", again=0, **attributes):
    """Have `SHAPES` hold a class. Attributes that are functions get the folder."""

    def hold(cls):
        def make(folder):
            made = {key: value(folder) if callable(value) else copy.deepcopy(value) for key, value in attributes.items()}
            return cls(**made)

        SHAPES[name] = Shape(make, expected, again)
        return cls

    return hold


class Base(Dataset):
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return N


class Client:
    def __init__(self, kind="disk"):
        self.kind = kind

    def get(self, path):
        return Path(path).read_bytes()


@shape("paired super-resolution", high=pictures, low=small, options=["disk"], client=None, train=True)
class Paired(Base):
    def __getitem__(self, index):
        if self.client is None:
            self.client = Client(self.options.pop())
        high_path = self.high[index]
        high = decoded(self.client.get(high_path))
        low = decoded(self.client.get(self.low[index]))
        if self.train:
            top, left = random.randint(0, 12 - 6), random.randint(0, 12 - 6)
            low = low[top : top + 6, left : left + 6, ...]
            high = high[top * 2 : top * 2 + 12, left * 2 : left * 2 + 12, ...]
            high, low = augmented([high, low])
        high, low = to_tensor(high), to_tensor(low)
        low.sub_(0.5).div_(0.5)
        return {"low": low, "high": high, "path": high_path}


@shape("degradations after loading", paths=pictures, client=None)
class Degraded(Base):
    def __getitem__(self, index):
        if self.client is None:
            self.client = Client()
        path, retries = self.paths[index], 3
        while retries > 0:
            try:
                data = self.client.get(path)
            except OSError:
                path = self.paths[random.randint(0, len(self) - 1)]
            else:
                break
            finally:
                retries -= 1
        (picture,) = augmented([decoded(data)])
        size = random.choice([3, 5, 7])
        kernel = np.random.gamma(2.0, size=(size, size)) if np.random.uniform() < 0.3 else np.full((size, size), 1 / size**2)
        return {"picture": to_tensor(picture), "kernel": torch.FloatTensor(kernel), "path": path}


@shape("noise of a drawn level", high=pictures, phase="train")
class Noisy(Base):
    def __getitem__(self, index):
        path = self.high[index]
        high = read(path)
        if self.phase == "train":
            (patch,) = augmented(cropped(12, high))
            high = to_tensor(patch)
            low = high.clone()
            level = torch.FloatTensor([np.random.uniform(0, 75)]) / 255.0
            low.add_(torch.randn(low.size()).mul_(level))
        else:
            high = to_tensor(high)
            low = high.clone()
        return {"low": low, "high": high, "path": path}


@shape("a scale for several samples", "uncached", high=pictures, count=0, scale=1)
class Scaled(Base):
    def __getitem__(self, index):
        picture = read(self.high[index])
        if self.count % 4 == 0:
            self.scale = random.choice([1, 2, 3])
        self.count += 1
        return to_tensor(picture)[:, :: self.scale]


@shape("flip and affine of a drawn scale", "cut, hoisted", paths=pictures, objects=boxes, train=True,
       rng=lambda _: np.random.RandomState(3))  # fmt: skip
class Affine(Base):
    def __getitem__(self, index):
        objects = self.objects[index]
        picture = read(self.paths[index])
        height, width = picture.shape[0], picture.shape[1]
        scale, flipped = max(height, width) * 1.0, False
        if self.train:
            scale = scale * np.random.choice(np.arange(0.6, 1.4, 0.1))
            if np.random.random() < 0.5:
                flipped = True
                picture = picture[:, ::-1, :]
        pixels = picture.astype(np.float32) / 255.0
        if self.train:
            pixels += self.rng.normal(scale=0.1, size=(3,)).astype(np.float32)
        heat = np.zeros((3, SIDE, SIDE), np.float32)
        for each in objects:
            box = np.array(each["box"], np.float32)
            if flipped:
                box[[0, 2]] = width - box[[2, 0]] - 1
            box[:2] *= np.float32(scale / width)
            heat[each["kind"], int(abs(box[1])) % SIDE, int(abs(box[0])) % SIDE] = 1
        return {"input": pixels.transpose(2, 0, 1), "heat": heat}


@shape("some samples return early", "cut, hoisted", paths=pictures, labels=masks, mapping={1: 0, 2: 1, 3: 255})
class Early(Base):
    def __getitem__(self, index):
        picture = read(self.paths[index])
        if index % 3 == 0:
            return picture.transpose((2, 0, 1)).copy(), index
        label = read(self.labels[index])
        for key, value in self.mapping.items():
            label[label == key] = value
        picture, label = cropped(16, picture, label)
        step = np.random.choice(2) * 2 - 1
        return picture[:, ::step].transpose((2, 0, 1)).copy(), label[:, ::step].copy(), os.path.basename(self.paths[index])


class Generator:
    def __call__(self, sample):
        picture, label = sample["picture"], sample["label"]
        if random.random() > 0.5:
            picture, label = augmented([picture, label])
        elif random.random() > 0.5:
            picture = np.roll(picture, np.random.randint(-20, 20), 0)
        return {"picture": torch.from_numpy(picture.astype(np.float32))[None], "label": torch.from_numpy(label.copy()).long()}


@shape("archives with a transform of its own", paths=archives, transform=lambda _: Generator())
class Archives(Base):
    def __getitem__(self, idx):
        data = np.load(self.paths[idx])
        sample = {"picture": data["picture"], "label": data["label"]}
        return {**self.transform(sample), "name": f"case{idx}"}


@shape("with, around the draw", "uncached", paths=archives)
class Within(Base):
    def __getitem__(self, idx):
        with np.load(self.paths[idx]) as data:
            start = random.randrange(8)
            picture = data["picture"][start : start + 16]
        return picture


@shape("speech: noise, then a spectrogram", "cut, hoisted", paths=arrays, words=texts, noise=0.4)
class Speech(Base):
    def parse_audio(self, path):
        wave, _ = read_wave(path)
        if self.noise and np.random.binomial(1, self.noise):
            wave = wave + np.random.normal(size=wave.shape) * 0.1
        spectrum = torch.FloatTensor(np.log1p(np.abs(np.fft.rfft(wave.reshape(-1, 32)))))
        spectrum.add_(-spectrum.mean())
        start = np.random.randint(0, 8)
        spectrum[start : start + 3] = 0
        return spectrum

    def __getitem__(self, index):
        spectrum = self.parse_audio(self.paths[index])
        return spectrum, (read_numbers(self.words[index])[:, 0] % 29).astype(int).tolist()


class Segment(Base):
    """A random part of a wave, which may be kept for the next samples."""

    def __getitem__(self, index):
        if self.count == 0:
            audio, _ = read_wave(self.paths[index])
            audio = audio / np.abs(audio).max() * 0.95
            self.kept_wave = audio
            self.count = self.reuse
        else:
            audio = self.kept_wave
            self.count -= 1
        audio = torch.FloatTensor(audio).unsqueeze(0)
        if audio.size(1) >= 100:
            start = random.randint(0, audio.size(1) - 100)
            audio = audio[:, start : start + 100]
        mel = audio.unfold(1, 16, 8).abs().sum(-1)
        return mel.squeeze(), audio.squeeze(0), self.paths[index]


shape("a segment of a wave", "cut, hoisted", paths=arrays, count=0, reuse=0)(Segment)
shape("a wave that is used again", "uncached", paths=arrays, count=0, reuse=1)(Segment)


@shape("points of its own dict, changed in place", "uncached", points=texts, kept={})
class Kept(Base):
    def __getitem__(self, index):
        if index in self.kept:
            points, label = self.kept[index]
        else:
            points, label = read_numbers(self.points[index]).astype(np.float32), np.array([index % 3]).astype(np.int32)
            self.kept[index] = points, label
        points[:, 0:3] = (points[:, 0:3] - points[:, 0:3].mean(0)) / np.abs(points[:, 0:3]).max()
        return np.roll(points, np.random.randint(0, len(points)), 0)[:20], label


class Scans(Base):
    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:
            raw = np.frombuffer(file.read()[-4 * 24 * 24 :], dtype=np.float32).reshape((-1, 4))
        return raw[:, :3].copy(), raw[:, 3].astype(np.uint8) % 4, raw[:, 3]


@shape("scans within another dataset", scans=lambda folder: Scans(paths=arrays(folder)))
class Voxels(Base):
    def __getitem__(self, index):
        data = self.scans[index]
        if len(data) == 3:
            points, labels, strength = data
        angle = np.random.uniform(0, np.pi * 2)
        points[:, :2] = points[:, :2].dot([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        if np.random.choice(4, 1) == 1:
            points[:, 0] = -points[:, 0]
        return np.floor(points / 32).astype(np.int64), labels, np.concatenate((points, strength[:, None]), axis=1)


@shape("a crop is drawn, then files are read", "cut, hoisted", paths=pictures, labels=masks)
class Drawn(Base):
    def __getitem__(self, idx):
        top, left = random.randint(0, SIDE - 16), random.randint(0, SIDE - 16)
        picture = read(self.paths[idx])
        label = read(self.labels[idx]).astype(np.int64) - 1
        picture, label = picture[top : top + 16, left : left + 16], label[top : top + 16, left : left + 16]
        return to_tensor(picture), torch.from_numpy(label.copy())


def get_params(size):
    return {"at": (random.randint(0, size[0] - 16), random.randint(0, size[1] - 16)), "flip": random.random() > 0.5}


def get_transform(params, divide=True):
    steps = [lambda picture: picture.crop((*params["at"], params["at"][0] + 16, params["at"][1] + 16))]
    if params["flip"]:
        steps += [lambda picture: picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
    return Compose(*steps, to_tensor, *[lambda pixels: (pixels - 0.5) / 0.5] * divide)


@shape("parameters are drawn before a second file", "cut, hoisted", paths=pictures, labels=masks)
class Params(Base):
    def __getitem__(self, index):
        label = Image.open(self.labels[index])
        params = get_params(label.size)
        transform_label = get_transform(params, divide=False)
        label_tensor = transform_label(label) * 255.0
        label_tensor[label_tensor == 255] = 35
        path = self.paths[index]
        picture = Image.open(path)
        picture = picture.convert("RGB")
        picture_tensor = get_transform(params)(picture)
        return {"label": label_tensor, "picture": picture_tensor, "path": path}


@shape("a random partner", "cut, hoisted", 1, ones=pictures, others=small, one_step=flipping, other_step=flipping, serial=False)
class Unaligned(Base):
    def __getitem__(self, index):
        one_path = self.ones[index % len(self.ones)]
        other_index = index % len(self.others) if self.serial else random.randint(0, len(self.others) - 1)
        one_picture = Image.open(one_path).convert("RGB")
        other_picture = Image.open(self.others[other_index]).convert("RGB")
        return {"one": self.one_step(one_picture), "other": self.other_step(other_picture), "path": one_path}


def center_window(picture, side):
    while min(*picture.size) >= 2 * side:
        picture = picture.resize(tuple(x // 2 for x in picture.size), resample=Image.Resampling.BOX)
    return np.array(picture)[:side, :side]


@shape("a window in the middle, flipped", "cut, hoisted", paths=pictures, random_crop=False, classes=range(N))
@shape("a random window, flipped", "cut, hoisted", paths=pictures, random_crop=True, classes=range(N))
class Windows(Base):
    def __getitem__(self, idx):
        with open(self.paths[idx], "rb") as file:
            picture = Image.open(file)
            picture.load()
        picture = picture.convert("RGB")
        if self.random_crop:
            (window,) = cropped(10, np.array(picture))
        else:
            window = center_window(picture, 10)
        if random.random() < 0.5:
            window = window[:, ::-1]
        window = window.astype(np.float32) / 127.5 - 1
        return np.transpose(window, [2, 0, 1]), self.classes[idx]


def apply_seeded(sample, transform):
    seed = np.random.randint(2147483647)
    for part in ("picture", "mask"):
        random.seed(seed)
        torch.random.manual_seed(seed)
        sample[part] = transform(sample[part])
    return sample


@shape("seeds that are drawn", paths=pictures, labels=masks, augment=lambda _: Flip())
class Seeds(Base):
    def __getitem__(self, idx):
        sample = {"idx": idx}
        sample["picture"] = read(self.paths[idx])[:, :, 0] / 255
        sample["mask"] = read(self.labels[idx])
        return apply_seeded(sample, self.augment)


@shape("seeds at the first sample of a worker", "uncached", ones=pictures, flows=arrays, seeded=False)
class Flow(Base):
    def __getitem__(self, index):
        if not self.seeded:
            worker = get_worker_info()
            if worker is not None:
                torch.manual_seed(worker.id)
                np.random.seed(worker.id)
                random.seed(worker.id)
                self.seeded = True
        one, flow = read(self.ones[index]), np.load(self.flows[index])
        if np.random.rand() < 0.5:
            one, flow = one[:, ::-1].copy(), flow[:, ::-1] * -1.0
        return torch.from_numpy(one), torch.from_numpy(flow + np.random.randint(3))


@shape("random frames of a mapped video", paths=lambda folder: arrays(folder, "videos", (16, 6, 6)))
class Frames(Base):
    def load(self, path):
        try:
            return np.load(path, mmap_mode="r")
        except OSError:
            return []

    def __getitem__(self, index):
        video = self.load(self.paths[index])
        while len(video) == 0:
            video = self.load(self.paths[random.randint(0, len(self) - 1)])
        starts = [random.randint(0, 3) + 4 * segment for segment in range(4)]
        return torch.from_numpy(video[starts]), index


@shape("tries until it succeeds", "uncached", paths=pictures)
class Tries(Base):
    def __getitem__(self, index):
        while True:
            try:
                picture = read(self.paths[index])
                if random.random() < 0.5:
                    picture = picture[:, ::-1]
                return to_tensor(picture)
            except OSError:
                index = random.randint(0, N - 1)


@shape("transforms that are made in the call", paths=pictures, labels=masks)
class Made(Base):
    def transform(self, picture, label):
        composed = Compose(lambda *parts: list(map(np.asarray, parts)), Flip(), lambda one, other: cropped(16, one, other))
        return composed(picture, label)

    def __getitem__(self, index):
        picture, label = Image.open(self.paths[index]).convert("RGB"), Image.open(self.labels[index])
        return self.transform(picture, label)


class Mosaic(Base):
    def load_picture(self, index):
        picture = read(self.paths[index])
        return resized(picture), picture.shape[:2], (16, 16)

    def load_mosaic(self, index):
        tiles = [self.load_picture(number)[0] for number in (index, *random.choices(range(N), k=3))]
        return np.vstack((np.hstack(tiles[:2]), np.hstack(tiles[2:])))

    def __getitem__(self, index):
        index = self.indices[index]
        if mosaic := self.mosaic and random.random() < self.mosaic:
            picture, ratio = self.load_mosaic(index), 1
        else:
            picture, (_, width), (_, side) = self.load_picture(index)
            ratio = side / width
        labels = random_of(index, 4, 5, dtype=np.float32) * ratio
        picture = picture * np.float32(random.uniform(0.9, 1.1))
        if random.random() < 0.5:
            picture = np.fliplr(picture)
            labels[:, 1] = 1 - labels[:, 1]
        return to_tensor(picture), torch.from_numpy(labels), self.paths[index], mosaic


shape("a mosaic", "uncached", 4, paths=pictures, indices=range(N), mosaic=0.5)(Mosaic)
shape("a mosaic that is off", "cut, hoisted", paths=pictures, indices=range(N), mosaic=0.0)(Mosaic)


@shape("mixup", again=1, paths=pictures)
class Mixup(Base):
    def __getitem__(self, idx):
        picture = read(self.paths[idx]).astype(np.float32)
        label = np.eye(3)[idx % 3]
        if random.random() < 0.5:
            other = random.randrange(N)
            share = np.random.beta(0.4, 0.4)
            picture = picture * share + read(self.paths[other]) * (1 - share)
            label = label * share + np.eye(3)[other % 3] * (1 - share)
        return picture, label


@shape("a wave in a loop", "uncached", paths=arrays)
class Utterances(Base):
    def __getitem__(self, index):
        features = []
        for number in (index, (index + 1) % N):
            wave, _ = read_wave(self.paths[number])
            start = int(random.random() * (len(wave) - 100))
            features.append(wave[start : start + 100])
        return torch.FloatTensor(np.stack(features, axis=0)), index % 3


@shape("cameras of a robot", paths=pictures, others=small, transforms=flipping)
class Robot(Base):
    def __getitem__(self, idx):
        item = {"near": {step: not 0 <= idx + step < N for step in (-2, 2)}}
        item |= {"camera": read(self.paths[idx]), "hand": read(self.others[idx])}
        if self.transforms is not None:
            for camera in ("camera", "hand"):
                item[camera] = self.transforms(item[camera])
        item["task"] = f"task {idx % 2}"
        return item


@shape("a picture that is open, and a template", "cut, hoisted", paths=pictures, templates=("a {}", "the {}"), flip=flipping)
class Inversion(Base):
    def __getitem__(self, i):
        picture = Image.open(self.paths[i % N])
        if not picture.mode == "RGB":
            picture = picture.convert("RGB")
        text = random.choice(self.templates).format("toy")
        pixels = np.array(picture).astype(np.uint8)
        picture = Image.fromarray(pixels[:16, :16]).resize((8, 8), resample=Image.Resampling.BICUBIC)
        return {"ids": [ord(letter) for letter in text], "pixels": self.flip(picture)}


class Coco(Base):
    def __getitem__(self, index):
        return Image.open(self.paths[index]).convert("RGB"), copy.deepcopy(self.objects[index])


def prepared(picture, target):
    boxes = torch.as_tensor([each["box"] for each in target["objects"]], dtype=torch.float32).reshape(-1, 4)
    boxes[:, 0::2].clamp_(min=0, max=picture.size[0])
    return picture, {"boxes": boxes, "id": torch.tensor([target["id"]])}


@shape("transforms of a picture and its boxes", paths=pictures, objects=boxes, prepare=lambda _: prepared,
       steps=lambda _: Compose(Flip(), lambda picture, boxes: (to_tensor(picture), boxes + random.random())))  # fmt: skip
class Detection(Coco):
    def __getitem__(self, idx):
        picture, target = super().__getitem__(idx)
        picture, target = self.prepare(picture, {"id": idx, "objects": target})
        picture, target["boxes"] = self.steps(picture, target["boxes"])
        return picture, target


@shape("masked words, changed in place", paths=texts)
class Masked(Base):
    def mask(self, tokens):
        labels = []
        for number, token in enumerate(tokens):
            if random.random() < 0.15:
                tokens[number] = random.randrange(30)
                labels.append(token)
            else:
                labels.append(0)
        return tokens, labels

    def __getitem__(self, item):
        words = read_numbers(self.paths[item])[:, 0].astype(int).tolist()
        tokens, labels = self.mask(words)
        return {"tokens": torch.tensor([1, *tokens, 2]), "labels": torch.tensor([0, *labels, 0])}


@shape("audio with a random gain", paths=arrays)
class Gain(Base):
    def __getitem__(self, idx):
        wave = torch.from_numpy(read_wave(self.paths[idx])[0])
        gain = torch.empty(1).uniform_(0.5, 1.5)
        wave *= gain
        return wave.clamp_(-1, 1), idx


@shape("two views", paths=pictures, transform=flipping)
class Views(Base):
    def __getitem__(self, idx):
        picture = Image.open(self.paths[idx]).convert("RGB").resize((16, 16))
        picture = np.asarray(picture)
        return [self.transform(picture) for _ in range(2)], idx


@shape("private names", paths=pictures)
class Private(Base):
    def __load(self, idx):
        self.__loaded = idx
        return read(self.paths[idx])

    def __jitter(self, picture, *, __most=8):
        return picture + random.randint(0, __most)

    def __getitem__(self, idx):
        __picture = self.__load(idx)
        __picture = self.__jitter(__picture)
        return to_tensor(__picture)


def decorator(function):
    @functools.wraps(function)
    def wrapper(self, idx):
        self.mosaic = random.random() < 0.5
        return function(self, idx)

    return wrapper


@shape("decorated", "uncached", paths=pictures)
class Decorated(Base):
    @decorator
    def __getitem__(self, idx):
        picture = read(self.paths[idx])
        return picture[:, ::-1].copy() if self.mosaic else picture


@shape("functions and imports before the draw", "cut, hoisted", paths=pictures)
class Nested(Base):
    def __getitem__(self, idx):
        import math
        from os import path as paths

        picture = read(self.paths[idx])
        size = picture.shape[0]

        def shifted(by, factor=2):
            return np.roll(picture, by * factor, 0) if size else picture

        scaled = lambda value: value * math.pi
        return shifted(random.randrange(size)), scaled(random.random()), paths.basename(self.paths[idx])


class Rarely(Base):
    """Sets an attribute before the draw, of another value for few samples, and reads it after it."""

    bright = False

    def load(self, idx):
        picture = read(self.paths[idx])
        if self.in_method:
            self.bright = idx == 7
        return picture

    def __getitem__(self, idx):
        picture = self.load(idx)
        if not self.in_method:
            self.bright = idx == 7
        shift = random.randrange(8)
        return np.roll(picture, shift, 0) if self.bright else picture


shape("an attribute that the rest reads", paths=pictures, in_method=False)(Rarely)
shape("an attribute that a method sets and the rest reads", "uncached", paths=pictures, in_method=True)(Rarely)


def pad(picture, by):
    return np.pad(picture, ((by, by), (by, by), (0, 0)))


@shape("a static method and functions of the same name", paths=pictures)
class Names(Base):
    @staticmethod
    def picture(path):
        return read(path)

    @classmethod
    def pad(cls, picture):
        return pad(picture, random.randrange(3))[:SIDE, :SIDE]

    def __getitem__(self, idx):
        picture = self.picture(self.paths[idx])
        size = sum(sum for sum in picture.shape)
        picture = self.pad(picture)
        return picture, size


@shape("several statements in a line", paths=pictures, labels=masks)
class OneLine(Base):
    def __getitem__(self, idx):
        one = read(self.paths[idx]); other = read(self.labels[idx]); at = random.randrange(8); one = one[at:]  # fmt: skip  # noqa: E702
        return one.copy(), other[at:].copy()


@shape("no draw", "cached", paths=pictures)
class Plain(Base):
    def __getitem__(self, idx):
        return to_tensor(resized(read(self.paths[idx]))), idx


@shape("parts that share memory", paths=arrays)
class Shared(Base):
    def __getitem__(self, idx):
        target = np.load(self.paths[idx])
        boxes, kinds = target[:, :4], target[:, 4]
        if random.random() < 0.5:
            boxes *= random.random()
            kinds += 1
        return target


@shape("parts that rarely share memory", paths=arrays)
class Rare(Base):
    def __getitem__(self, idx):
        before = np.load(self.paths[idx])
        after = before
        if random.random() < 0.02:
            after += 1
        return before, after


@shape("a picture in its own memory", paths=pictures, kept=[None] * N)
class InMemory(Base):
    def __getitem__(self, idx):
        if self.kept[idx] is None:
            self.kept[idx] = read(self.paths[idx])
        picture = resized(self.kept[idx])
        return np.roll(picture, random.randrange(16), 0)


def outcome(cached):
    """Return what becomes of a cached dataset, in the words of `Shape.expected`."""
    if cached.is_left or cached._split is None:
        return "uncached" if cached.is_left else "cached"
    (plan,) = cached._split.plans.values()
    straight = Program(plan.division.straight())
    with contextlib.suppress(SampleError):
        pack_sample(straight.first(cached.dataset, 0))  # which closes its pictures
    return "cut" if straight.identity == plan.identity else "cut, hoisted"
