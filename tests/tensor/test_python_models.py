"""Python models: each instance a process of its own, which may fail, die or hang."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from itertools import count
from textwrap import dedent, indent

import numpy as np
import psutil
import pytest

from maitred.errors import InstanceLost, InvalidRequest, KernelError
from maitred.tensor.arrays import array_of, tensor_of
from maitred.tensor.check import check
from maitred.tensor.local import LocalTensorService
from maitred.tensor.python.instance import python_opener
from maitred.tensor.repository import State
from maitred.tensor.served_models import OPENERS
from maitred.tensor.service import InferRequest
from tests.waiting import until_async

CONFIG = """
backend: "python" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [-1] }
output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
"""
TEXTS = """
backend: "python"
input { name: "IN" data_type: TYPE_STRING dims: [-1] }
output { name: "OUT" data_type: TYPE_STRING dims: [-1] }
"""
DOUBLES = 'pb.InferenceResponse([pb.Tensor("OUT", array * 2)])'


def triton_model(answer=DOUBLES, before=""):
    """A model.py whose `execute` answers with the expression, of the request's array."""
    return dedent("""
        import os, time
        import numpy as np
        import triton_python_backend_utils as pb

        class TritonPythonModel:
            def initialize(self, args):
                self.args = args

            def execute(self, requests):
                answers = []
                for request in requests:
                    array = pb.get_input_tensor_by_name(request, "IN").as_numpy()
        {before}
                    answers.append({answer})
                return answers
        """).format(before=indent(dedent(before), " " * 12), answer=answer)


def write(repository, name, code, config=CONFIG):
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    if code:
        (repository / name / "1" / "model.py").write_text(code)


@asynccontextmanager
async def served(repository, *, allow_code=True):
    openers = {**OPENERS, "python": python_opener(allow_code=allow_code)}
    service = LocalTensorService(repository, openers=openers)
    await service.start()
    try:
        yield service
    finally:
        for name in {entry.name for entry in service.index(ready_only=True)}:
            service.models.drop(name)
        await service.close()


NUMBERS = count()


async def asked(service, model, array):
    kind = "TYPE_STRING" if array.dtype.hasobject else "TYPE_FP32"
    request = InferRequest(request_id=f"r{next(NUMBERS)}", model=model, inputs=(tensor_of("IN", array, kind),))
    return array_of((await service.infer(request)).outputs[0])


def row(*values):
    return np.array([values], np.float32)


async def test_a_model_py_of_tritons_runs_whole_batches_in_a_process_of_its_own(tmp_path):
    write(tmp_path, "double", triton_model('pb.InferenceResponse([pb.Tensor("OUT", array * 2 + os.getppid() * 0)])'))
    write(tmp_path, "pid", triton_model('pb.InferenceResponse([pb.Tensor("OUT", array * 0 + os.getpid())])'))
    async with served(tmp_path) as service:
        found = await asyncio.gather(*(asked(service, "double", row(i, 0.5)) for i in range(20)))
        assert all(np.array_equal(each, row(2 * i, 1)) for i, each in enumerate(found))
        assert int((await asked(service, "pid", row(0)))[0, 0]) != os.getpid()
        large = np.arange(1 << 18, dtype=np.float32)[None]
        assert np.array_equal(await asked(service, "double", large), large * 2)
        assert np.array_equal(await asked(service, "double", row(1)), row(2))


async def test_an_installed_class_is_found_by_its_entry_point_and_needs_no_leave(tmp_path, monkeypatch):
    package = tmp_path / "site"
    info = package / "shout-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shout\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[maitred.models]\nshout = shout:Shout\n")
    (package / "shout.py").write_text(
        dedent("""
        import numpy as np

        class Shout:
            def load(self, folder, parameters):
                self.mark = parameters["mark"]

            def predict(self, inputs):
                return {"OUT": np.array([text.decode().upper() + self.mark for text in inputs["IN"]], object)}
        """)
    )
    monkeypatch.setenv("PYTHONPATH", f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    repository = tmp_path / "models"
    parameters = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in (("entry_point", "shout"), ("mark", "!"))
    )
    write(repository, "loud", "", TEXTS + parameters)
    write(repository, "wrong", "", TEXTS + parameters.replace('"shout"', '"none"'))
    async with served(repository, allow_code=False) as service:
        texts = np.array([b"a", "\xe9".encode()], object)
        assert (await asked(service, "loud", texts)).tolist() == [b"A!", "\xc9!".encode()]
        reasons = {entry.name: entry.reason for entry in service.index()}
        assert "no installed package has 'none'" in reasons["wrong"]


async def test_code_of_a_repository_needs_leave_and_is_told_what_is_wrong(tmp_path):
    write(tmp_path, "double", triton_model())
    write(tmp_path, "broken", "raise RuntimeError('no weights')")
    write(tmp_path, "empty", "x = 1")
    write(tmp_path, "sequences", triton_model(), CONFIG + "sequence_batching {} instance_group { count: 2 }")
    async with served(tmp_path, allow_code=False) as service:
        assert not service.index(ready_only=True)
        assert all("--allow-repository-code" in e.reason for e in service.index() if e.name in ("double", "broken"))
    async with served(tmp_path) as service:
        reasons = {entry.name: entry.reason for entry in service.index()}
        assert "no weights" in reasons["broken"]
        assert "no class TritonPythonModel" in reasons["empty"]
        assert "needs one instance, and instance_group has 2" in reasons["sequences"]
        assert [e.name for e in service.index() if e.state is State.READY] == ["double"]
    assert {each.path.rpartition("/")[2]: each.served for each in check(tmp_path, allow_code=True)}["double"]
    assert not any(each.served for each in check(tmp_path))


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (
            'pb.InferenceResponse(error=pb.TritonError("too hot", pb.TritonError.INVALID_ARG))',
            InvalidRequest,
            "too hot",
        ),
        ('pb.InferenceResponse(error=pb.TritonError("no luck"))', KernelError, "no luck"),
        ("1 / 0", KernelError, "ZeroDivisionError"),
        ('pb.InferenceResponse([pb.Tensor("OTHER", array)])', KernelError, r"no output 'OUT', but \['OTHER'\]"),
        (
            'pb.InferenceResponse([pb.Tensor("OUT", array[0])])',
            KernelError,
            r"shape \[1\]; the config says .*\[1, -1\]",
        ),
        ('pb.InferenceResponse([pb.Tensor("OUT", array.astype("int8"))])', KernelError, "of int8 and shape"),
        ("None", KernelError, "must return a list"),
        ("request.exec()", KernelError, "ensemble"),
    ],
)
async def test_what_a_model_does_wrong_is_told(tmp_path, answer, error, says):
    write(tmp_path, "m", triton_model(f"{answer} if array[0, 0] else {DOUBLES}"))
    async with served(tmp_path) as service:
        with pytest.raises(error, match=says):
            await asked(service, "m", row(1))
        assert np.array_equal(await asked(service, "m", row(0)), row(0))


async def test_only_the_request_that_makes_a_batch_fail_fails(tmp_path):
    config = CONFIG + "dynamic_batching { preferred_batch_size: [8] max_queue_delay_microseconds: 60000000 }"
    write(tmp_path, "m", triton_model(before="if (array < 0).any(): raise ValueError('below 0')"), config)
    async with served(tmp_path) as service:
        asking = [asked(service, "m", row(value)) for value in (1, 2, -1, 3, 4, 5, 6, 7)]
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert [isinstance(each, KernelError) for each in found] == [False, False, True, *[False] * 5]


async def test_a_batch_whose_instance_is_killed_runs_again(tmp_path):
    write(
        tmp_path,
        "m",
        triton_model(
            before=f"""
        if array[0, 0] == 7 and not os.path.exists({str(tmp_path / "go")!r}):
            open({str(tmp_path / "began")!r}, "w").close()
            time.sleep(1000)
        """
        ),
    )
    async with served(tmp_path) as service:
        asking = asyncio.ensure_future(asked(service, "m", row(7)))
        await until_async((tmp_path / "began").exists)
        (tmp_path / "go").touch()
        (process,) = [each for each in psutil.Process().children() if "python.process" in " ".join(each.cmdline())]
        process.send_signal(signal.SIGKILL)
        assert np.array_equal(await asking, row(14))
        assert np.array_equal(await asked(service, "m", row(1)), row(2))


async def test_an_instance_that_hangs_is_ended_and_who_hangs_it_twice_is_told(tmp_path):
    limit = 'parameters { key: "execution_timeout_ms" value { string_value: "1500" } }'
    write(tmp_path, "m", triton_model(before="while array[0, 0] == 7: time.sleep(1)"), CONFIG + limit)
    async with served(tmp_path) as service:
        with pytest.raises(InstanceLost, match=r"did not answer in 1.5 s"):
            await asked(service, "m", row(7))
        assert np.array_equal(await asked(service, "m", row(1)), row(2))


async def test_processes_end_with_their_model(tmp_path):
    write(tmp_path, "double", triton_model(), CONFIG + "instance_group { count: 2 }")

    def processes():
        return [each for each in psutil.Process().children() if "python.process" in " ".join(each.cmdline())]

    async with served(tmp_path) as service:
        assert len(processes()) == 2
        service.models.drop("double")
    await until_async(lambda: not processes())
