"""Python models: each instance a process of its own, which may fail, die or hang."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import count
from textwrap import dedent, indent

import numpy as np
import psutil
import pytest

from maitred.core.clock import WallClock
from maitred.core.errors import EngineDead, InvalidRequest, KernelError
from maitred.core.tensor_request import InferRequest, ModelState, SequenceControl
from maitred.engine.client import EngineClient
from maitred.tensor.arrays import array_of, tensor_of
from maitred.tensor.check import check
from maitred.tensor.config import DATA_TYPES
from maitred.tensor.host import LocalTensorService
from maitred.tensor.instance import NUMPY_TYPES
from maitred.tensor.python.instance import python_opener
from maitred.tensor.served_models import OPENERS
from tests.tensor.test_engine import IN_PROCESS, start_of
from tests.waiting import until, until_async

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


def with_method(code, method):
    return code + indent(dedent(method), " " * 4)


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
            service.host.models.drop(name)
        await service.close()


def processes():
    """Of models, in this process or in an engine below it."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ends meanwhile
            found += [each] if "maitred.tensor.python.process" in each.cmdline() else []
    return found


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
    monkeypatch.syspath_prepend(package)
    monkeypatch.setenv("PYTHONPATH", f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    repository = tmp_path / "models"
    parameters = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
        for key, value in (("entry_point", "shout"), ("mark", "!"))
    )
    write(repository, "loud", "", TEXTS + parameters)
    write(repository, "shout", "", TEXTS + parameters.replace("entry_point", "unused"))  # found by its name
    write(repository, "wrong", "", TEXTS + parameters.replace('"shout"', '"none"'))
    async with served(repository, allow_code=False) as service:
        texts = np.array([b"a", "\xe9".encode()], object)
        for model in ("loud", "shout"):
            assert (await asked(service, model, texts)).tolist() == [b"A!", "\xc9!".encode()]
        reasons = {entry.name: entry.reason for entry in service.index()}
        assert "no installed package has 'none'" in reasons["wrong"]
    told = {each.path.rpartition("/")[2]: each for each in check(repository)}
    assert {name: each.served for name, each in told.items()} == {"loud": True, "shout": True, "wrong": False}
    assert "there are: shout" in told["wrong"].reason


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
        assert [e.name for e in service.index() if e.state is ModelState.READY] == ["double"]
    assert {each.path.rpartition("/")[2]: each.served for each in check(tmp_path, allow_code=True)}["double"]
    assert not any(each.served for each in check(tmp_path))


WRONG = [
    ('pb.InferenceResponse(error=pb.TritonError("too hot", pb.TritonError.INVALID_ARG))', InvalidRequest, "too hot"),
    ('pb.InferenceResponse(error=pb.TritonError("no luck"))', KernelError, "no luck"),
    ("1 / 0", KernelError, "ZeroDivisionError"),
    ('pb.InferenceResponse([pb.Tensor("OTHER", array)])', KernelError, r"no output 'OUT', but \['OTHER'\]"),
    ('pb.InferenceResponse([pb.Tensor("OUT", array[0])])', KernelError, r"shape \[1\]; the config says .*\[1, -1\]"),
    ('pb.InferenceResponse([pb.Tensor("OUT", array.astype("int8"))])', KernelError, "of int8 and shape"),
    ("None", KernelError, "must return a list"),
    ("request.exec()", KernelError, "ensemble"),
]


async def test_what_a_model_does_wrong_is_told(tmp_path):
    answers = ", ".join(f"lambda: {answer}" for answer in (*(answer for answer, *_ in WRONG), DOUBLES))
    write(tmp_path, "m", triton_model(f"[{answers}][int(array[0, 0])]()"))
    async with served(tmp_path) as service:
        for number, (_, error, says) in enumerate(WRONG):
            with pytest.raises(error, match=says):
                await asked(service, "m", row(number))
            assert np.array_equal(await asked(service, "m", row(len(WRONG))), row(2 * len(WRONG)))


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
        (process,) = processes()
        process.send_signal(signal.SIGKILL)
        assert np.array_equal(await asking, row(14))
        assert np.array_equal(await asked(service, "m", row(1)), row(2))


async def test_an_instance_that_hangs_is_ended_and_who_hangs_it_twice_is_told(tmp_path):
    limit = 'parameters { key: "execution_timeout_ms" value { string_value: "1500" } }'
    write(tmp_path, "m", triton_model(before="while array[0, 0] == 7: time.sleep(1)"), CONFIG + limit)
    async with served(tmp_path) as service:
        with pytest.raises(EngineDead, match=r"did not answer in 1.5 s"):
            await asked(service, "m", row(7))
        assert np.array_equal(await asked(service, "m", row(1)), row(2))


async def test_processes_end_with_their_model(tmp_path):
    write(tmp_path, "double", triton_model(), CONFIG + "instance_group { count: 2 }")

    async with served(tmp_path) as service:
        assert len(processes()) == 2
        service.host.models.drop("double")
    await until_async(lambda: not processes())


async def test_a_model_is_finalized_when_it_is_unloaded(tmp_path):
    finalize = f"""
        def finalize(self):
            open({str(tmp_path / "finalized")!r}, "w").close()
        """
    write(tmp_path / "models", "double", with_method(triton_model(), finalize))
    async with served(tmp_path / "models"):
        assert not (tmp_path / "finalized").exists()
    await until_async((tmp_path / "finalized").exists)
    await until_async(lambda: not processes())


async def test_of_instances_under_load_one_is_killed_and_every_answer_is_whole(tmp_path):
    began, go = str(tmp_path / "began"), str(tmp_path / "go")
    waits = f"""
        open({began!r} + str(os.getpid()), "w").close()
        while not os.path.exists({go!r}): time.sleep(0.001)
    """
    write(
        tmp_path / "models", "m", triton_model(before=waits), CONFIG + "dynamic_batching {} instance_group { count: 2 }"
    )
    async with served(tmp_path / "models") as service:
        asking = [asyncio.ensure_future(asked(service, "m", row(value))) for value in range(60)]
        await until_async(lambda: len([*tmp_path.glob("began*")]) == 2)
        processes()[0].kill()
        (tmp_path / "go").touch()
        assert [float(each[0, 0]) for each in await asyncio.gather(*asking)] == [2.0 * value for value in range(60)]


COMPLETES = """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        return config
"""


async def test_a_model_completes_its_config_itself(tmp_path):
    code = with_method(triton_model(), COMPLETES)
    write(tmp_path, "bare", code, "")
    write(tmp_path, "other", code, CONFIG.replace("[-1]", "[3]").replace("max_batch_size: 8", ""))
    write(
        tmp_path,
        "decoupled",
        with_method(
            triton_model(),
            COMPLETES.replace("set_dynamic_batching()", 'set_model_transaction_policy({"decoupled": True})'),
        ),
        "",
    )
    (tmp_path / "bare" / "config.pbtxt").unlink()
    async with served(tmp_path) as service:
        config = service.config("bare")
        assert (config.max_batch_size, [*config.dynamic_batching.preferred_batch_size]) == (4, [4])
        assert np.array_equal(await asked(service, "bare", row(1, 2)), row(2, 4))
        reasons = {entry.name: entry.reason for entry in service.index()}
        assert "input 'IN' has dims [3] in the config, [-1] in the model" in reasons["other"]
        assert "decoupled models are not served" in reasons["decoupled"]


async def test_shapes_that_a_config_changes_are_changed_for_the_model(tmp_path):
    config = CONFIG.replace("dims: [-1]", "dims: [4] reshape { shape: [2, 2] }")
    write(tmp_path, "m", triton_model(before="assert array.shape[1:] == (2, 2), array.shape"), config)
    async with served(tmp_path) as service:
        assert np.array_equal(await asked(service, "m", row(1, 2, 3, 4)), row(2, 4, 6, 8))


SEQUENCE = """
sequence_batching {
  oldest {}
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }
  state { input_name: "SUM" output_name: "SUM_OUT" data_type: TYPE_FP32 dims: [1] }
}
"""


async def test_a_sequence_has_its_controls_and_its_state(tmp_path):
    """SUM_OUT = SUM + IN; OUT tells both."""
    reads = """
        start, total = (pb.get_input_tensor_by_name(request, name).as_numpy() for name in ("START", "SUM"))
        total = np.where(start > 0, 0, total) + array
    """
    answer = 'pb.InferenceResponse([pb.Tensor("OUT", total * 1), pb.Tensor("SUM_OUT", total.astype(np.float32))])'
    config = CONFIG.replace("[-1]", "[1]")
    write(tmp_path, "m", triton_model(answer, reads), config + SEQUENCE)
    write(tmp_path, "direct", triton_model(answer, reads), config + SEQUENCE.replace("oldest", "direct"))
    async with served(tmp_path) as service:
        for value, start, told in ((1, True, 1), (2, False, 3), (5, True, 5)):
            sequence = SequenceControl(correlation_id=7, start=start)
            inputs = (tensor_of("IN", row(value), "TYPE_FP32"),)
            request = InferRequest(request_id=f"r{next(NUMBERS)}", model="m", inputs=inputs, sequence=sequence)
            assert array_of((await service.infer(request)).outputs[0])[0, 0] == told
        (reason,) = [entry.reason for entry in service.index() if entry.name == "direct"]
        assert "direct of a Python model needs max_batch_size 1" in reason


def test_an_engine_killed_under_a_python_model_leaves_no_process_and_its_batch_runs_again(tmp_path):
    before = f"""
        open({str(tmp_path / "began")!r}, "w").close()
        while not os.path.exists({str(tmp_path / "go")!r}): time.sleep(0.001)
    """
    finalize = f"""
        def finalize(self):
            open({str(tmp_path / "finalized")!r} + str(os.getpid()), "w").close()
        """
    write(tmp_path / "models", "m", with_method(triton_model(before=before), finalize))

    async def story():
        start = start_of(tmp_path / "models", IN_PROCESS)
        tensors = replace(start.config.tensors, allow_repository_code=True)
        client = EngineClient(replace(start, config=replace(start.config, tensors=tensors)), WallClock())
        client.begin()
        await asyncio.to_thread(client.wait)
        client.attach(asyncio.get_running_loop())
        try:
            asking = asyncio.ensure_future(asked(client.tensors, "m", row(3)))
            await until_async((tmp_path / "began").exists)
            (old,) = processes()
            old.parent().kill()
            (tmp_path / "go").touch()
            assert np.array_equal(await asking, row(6))
            await until_async(lambda: not old.is_running())
            (new,) = processes()
        finally:
            await client.close()
        return new

    new = asyncio.run(story())
    until(lambda: not new.is_running())
    assert (tmp_path / f"finalized{new.pid}").exists()


def test_types_of_model_py_are_those_of_configs_and_its_process_imports_no_runtime():
    told = """
        import json, sys
        from maitred.tensor.python import process, triton
        names = triton.TRITON_STRING_TO_NUMPY
        types = {name: (triton.numpy_to_triton_type(kind), triton.np.dtype(kind).str) for name, kind in names.items()}
        print(json.dumps([types, sorted({"onnxruntime", "google.protobuf"} & {*sys.modules})]))
        """
    types, runtimes = json.loads(subprocess.check_output([sys.executable, "-c", dedent(told)]))
    assert types == {name: [DATA_TYPES[name], NUMPY_TYPES[name].str] for name in NUMPY_TYPES if name != "TYPE_BF16"}
    assert runtimes == []
