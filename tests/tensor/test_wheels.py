"""Models that wheels bring, served whole: files told apart by magika, and an image read by rapidocr's three models."""

from __future__ import annotations

import inspect
import json
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the extra tensor brings it")
pytest.importorskip("tritonclient", reason="tritonclient is not installed (make dev has it)")

import onnx
import onnxruntime
import tritonclient.http as triton

from tests.conftest import start_server
from tests.tensor.models import wheel_file, write_model


def client_of(running):
    return triton.InferenceServerClient(running.url.removeprefix("http://"))


def given(name, array, kind):
    tensor = triton.InferInput(name, [*array.shape], kind)
    tensor.set_data_from_numpy(array)
    return tensor


def alone(path, array):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: array})[0]


# ---- magika

FILES = {
    "python": b"import os\n\n\ndef main(path: str) -> None:\n    print(os.listdir(path))\n\n\nmain('.')\n" * 3,
    "json": json.dumps([{"name": f"guest {number}", "seats": number} for number in range(40)]).encode(),
    "html": b"<!DOCTYPE html><html><head><title>Soup</title></head><body><p>Two soups.</p></body></html>\n" * 3,
    "csv": b"guest,table,seats\n" + b"".join(b"%d,%d,2\n" % (number, number * 3) for number in range(99)),
}


def first_and_last_bytes(content, config):
    """Of a file, as magika has them: stripped, and padded where it is short."""
    size, pad = config["beg_size"], config["padding_token"]
    first, last = [*content.lstrip()[:size]], [*content.rstrip()[-size:]]
    return np.array(first + [pad] * (2 * size - len(first) - len(last)) + last, np.int32)


def test_magika_tells_files_of_several_clients_apart_as_it_does_alone(tmp_path):
    file = wheel_file("magika", "models/standard_v3_3/model.onnx")
    config = json.loads((file.parent / "config.min.json").read_text())
    batches = "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 2000 }"
    write_model(tmp_path, "magika", model=onnx.load(file), config=batches)
    rows = {name: first_and_last_bytes(content, config)[None] for name, content in FILES.items()}
    running = start_server("none", "--model-repository", str(tmp_path))

    def labelled(name):
        told = client_of(running).infer("magika", [given("bytes", rows[name], "INT32")]).as_numpy("target_label")
        np.testing.assert_allclose(told, alone(file, rows[name]), atol=1e-5)
        return config["target_labels_space"][int(told.argmax())]

    try:
        with ThreadPoolExecutor(len(FILES)) as clients:
            assert [*clients.map(labelled, 4 * [*FILES])] == 4 * [*FILES]
    finally:
        assert running.stop() == 0


# ---- rapidocr: detect, classify, recognise; what comes between is a Python model each

MODELS = {
    "det": "ch_PP-OCRv4_det_infer.onnx",
    "cls": "ch_ppocr_mobile_v2.0_cls_infer.onnx",
    "rec": "ch_PP-OCRv4_rec_infer.onnx",
}
NUM_CHARACTERS = 6625


def prepared(image):
    """Whole numbers [height, width, 3] as numbers from -1 to 1, [1, 3, height, width]."""
    return {"x": (image.astype(np.float32) / 127.5 - 1).transpose(2, 0, 1)[None]}


def cut(x, heat):
    """Lines 48 high, the shorter ones padded, and of each the first 192 columns."""
    rows, lines = (heat[0, 0] > 0.3).any(1).astype(int), []
    edges = np.flatnonzero(np.diff(np.concatenate([[0], rows, [0]])))
    for top, bottom in zip(edges[::2], edges[1::2], strict=True):
        columns = np.flatnonzero((heat[0, 0, top:bottom] > 0.3).any(0))
        more = (bottom - top) // 2  # what is found is the middle of a line
        left, right = max(0, columns[0] - more), columns[-1] + more
        line = x[0, :, max(0, top - more) : bottom + more, left:right]
        width = round(line.shape[2] * 48 / line.shape[1])
        sizes = ((line.shape[1], 48), (line.shape[2], width))
        down, across = (np.linspace(0, old - 1, new).round().astype(int) for old, new in sizes)
        lines.append(line[:, down][:, :, across])
    widest = max(192, *(line.shape[2] for line in lines))
    padded = np.stack([np.pad(line, ((0, 0), (0, 0), (0, widest - line.shape[2]))) for line in lines])
    return {"lines": padded, "widths": np.array([line.shape[2] for line in lines]), "begins": padded[..., :192].copy()}


def turned(lines, widths, upside):
    """Those that stand on their heads stand on their feet."""
    lines = lines.copy()
    for line, width, (_, is_turned) in zip(lines, widths, upside, strict=True):
        if is_turned > 0.9:
            line[:, :, :width] = line[:, ::-1, :width][:, :, ::-1].copy()
    return {"x": lines}


def read(scores):
    """Places in the alphabet, as connectionist temporal classification has them: repeats and blanks left out."""
    best = scores.argmax(2)
    kept = (best > 0) & (best != np.pad(best, ((0, 0), (1, 0)))[:, :-1])
    longest, rows = kept.sum(1).max(), zip(best, kept, strict=True)
    return {"places": np.stack([np.pad(row[keep], (0, longest - keep.sum())) for row, keep in rows])}


PICTURE, LINES = "FP32 1, 3, -1, -1", "FP32 -1, 3, 48, -1"
SCORES = f"FP32 -1, -1, {NUM_CHARACTERS}"
GLUE = {  # inputs and outputs by their types and shapes
    "prepare": (prepared, {"image": "UINT8 -1, -1, 3"}, {"x": PICTURE}),
    "cut": (
        cut,
        {"x": PICTURE, "heat": "FP32 -1, 1, -1, -1"},
        {"lines": LINES, "widths": "INT64 -1", "begins": "FP32 -1, 3, 48, 192"},
    ),
    "turn": (turned, {"lines": LINES, "widths": "INT64 -1", "upside": "FP32 -1, 2"}, {"x": LINES}),
    "read": (read, {"scores": SCORES}, {"places": "INT64 -1, -1"}),
}
MODEL_PY = """
import numpy as np
import triton_python_backend_utils as pb

{function}

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            given = {{each.name(): each.as_numpy() for each in request.inputs()}}
            answers.append(pb.InferenceResponse([pb.Tensor(*each) for each in {name}(**given).items()]))
        return answers
"""
STEPS = {  # of each model its inputs and outputs, by what stands for them in the ensemble
    "prepare": ({"image": "IMAGE"}, {"x": "picture"}),
    "det": ({"x": "picture"}, {"sigmoid_0.tmp_0": "heat"}),
    "cut": ({"x": "picture", "heat": "heat"}, {"lines": "lines", "widths": "widths", "begins": "begins"}),
    "cls": ({"x": "begins"}, {"save_infer_model/scale_0.tmp_1": "upside"}),
    "turn": ({"lines": "lines", "widths": "widths", "upside": "upside"}, {"x": "standing"}),
    "rec": ({"x": "standing"}, {"softmax_11.tmp_0": "SCORES"}),
    "read": ({"scores": "SCORES"}, {"places": "PLACES"}),
}


def tensors(kind, told):
    """Of a config, inputs or outputs."""
    parts = ((name, *text.split(" ", 1)) for name, text in told.items())
    return " ".join(f'{kind} {{ name: "{name}" data_type: TYPE_{of} dims: [{dims}] }}' for name, of, dims in parts)


def write_reader(repository: Path) -> dict[str, Path]:
    """The ensemble and its models; files of those that are ONNX."""
    files = {name: wheel_file("rapidocr_onnxruntime", f"models/{file}") for name, file in MODELS.items()}
    for name, file in files.items():
        write_model(repository, name, model=onnx.load(file))
    for name, (function, inputs, outputs) in GLUE.items():
        folder = repository / name
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(
            f'backend: "python" {tensors("input", inputs)} {tensors("output", outputs)}'
        )
        source = MODEL_PY.format(function=textwrap.dedent(inspect.getsource(function)), name=function.__name__)
        (folder / "1" / "model.py").write_text(source)
    steps = []
    for name, maps in STEPS.items():
        told = (f'{kind} {{ key: "{mine}" value: "{whole}" }}'
                for kind, names in zip(("input_map", "output_map"), maps, strict=True)
                for mine, whole in names.items())  # fmt: skip
        steps.append(f'step {{ model_name: "{name}" model_version: -1 {" ".join(told)} }}')
    whole = tensors("input", {"IMAGE": "UINT8 -1, -1, 3"}) + tensors(
        "output", {"SCORES": SCORES, "PLACES": "INT64 -1, -1"}
    )
    config = f'platform: "ensemble" {whole} ensemble_scheduling {{ {" ".join(steps)} }}'
    write_model(repository, "reader", versions=(), config=config)
    return files


def drawn(lines):
    """Text on white, a line below the other; the last one stands on its head."""
    images, drawing, fonts = (pytest.importorskip(f"PIL.{name}") for name in ("Image", "ImageDraw", "ImageFont"))
    page = images.new("RGB", (480, 96 * len(lines)), "white")
    for number, line in enumerate(lines):
        strip = images.new("RGB", (480, 64), "white")
        drawing.Draw(strip).text((32, 8), line, "black", fonts.load_default(40))
        page.paste(strip.rotate(180) if number == len(lines) - 1 else strip, (0, 96 * number + 16))
    return np.asarray(page)


def read_alone(files, image):
    """The same without a server: scores and places."""
    picture = prepared(image)["x"]
    parts = cut(picture, alone(files["det"], picture))
    standing = turned(parts["lines"], parts["widths"], alone(files["cls"], parts["begins"]))["x"]
    scores = alone(files["rec"], standing)
    return scores, read(scores)["places"]


@pytest.mark.soak
def test_rapidocr_reads_an_image_as_an_ensemble_of_detection_classification_and_recognition(tmp_path):
    files, lines = write_reader(tmp_path), ["soup for two", "table 17", "nobody waits"]
    image = drawn(lines)
    running = start_server("none", "--model-repository", str(tmp_path), "--allow-repository-code")
    try:
        told = client_of(running).infer("reader", [given("IMAGE", image, "UINT8")])
        scores, places = told.as_numpy("SCORES"), told.as_numpy("PLACES")
    finally:
        assert running.stop() == 0
    exact, exact_places = read_alone(files, image)
    np.testing.assert_allclose(scores, exact, atol=1e-4)
    assert np.array_equal(places, exact_places)
    session = onnxruntime.InferenceSession(files["rec"], providers=["CPUExecutionProvider"])
    alphabet = ["", *session.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]
    assert ["".join(alphabet[at] for at in row).replace(" ", "") for row in places] == [
        line.replace(" ", "") for line in lines
    ]
