"""The page of a server that has tensor models alone."""

from __future__ import annotations

import pytest

pytest.importorskip("google.protobuf", reason="the extra tensor brings it")

from maitred.api.dialects.kserve.routes import kserve_routes
from maitred.api.routes import make_routes
from maitred.api.tensor.extensions import Extensions, Labels
from maitred.core.tensor_request import IndexEntry, ModelState
from tests.api.test_tenants import table_of
from tests.fakes_api import FakeTenants, make_model, running_server
from tests.page.test_live import LaneReplica


class Repository:
    """Three versions of two models, as a TensorModels tells of them."""

    def index(self, *, ready_only: bool = False) -> list[IndexEntry]:
        return [
            IndexEntry("dishes", 1, ModelState.READY),
            IndexEntry("dishes", 2, ModelState.UNAVAILABLE, "cut off, or <b>no</b> ONNX file"),
            IndexEntry("wines"),
        ]


@pytest.mark.parametrize("key", ["boss", "user"])
def test_a_server_of_tensor_models_alone_shows_them_first_and_nothing_of_a_language_model(key, open_page, expect):
    replica, routes = LaneReplica(), make_routes(kserve_routes(Extensions("maitred", Labels(None))))
    replica.tensors = Repository()
    tenants = FakeTenants(table_of({"boss": {}, "user": {}}))
    with running_server(replica, make_model(names=()), routes=routes, tenants=tenants) as server:
        page = open_page(server.url, key=key, expected=("/admin/policy", "403"))
        rows = page.locator("#tensor-models tbody tr")
        expect(rows).to_have_text(
            ["dishes1READY", "dishes2UNAVAILABLEcut off, or <b>no</b> ONNX file", "wines–NOT LOADED"]
        )
        expect(page.locator("#models-note")).to_have_text("1 of 3 versions ready")
        expect(page.locator("#model")).to_have_text("tensor models")
        expect(page.locator("#engine .card:visible").first).to_have_id("models-card")
        for hidden in ("#chat", "#stats", "#timeline", "#blocks"):
            expect(page.locator(hidden)).to_be_hidden()
        expect(page.locator("#lanes li")).to_have_count(2 if key == "boss" else 0)
