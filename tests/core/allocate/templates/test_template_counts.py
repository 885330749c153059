"""For all counts, the template is deterministic and verified, or the refusal's fix works."""

import re

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rackloom.core.allocate.templates.generate import generate_template
from rackloom.core.allocate.templates.layout import Align, TemplateRequest
from rackloom.errors import Refused
from rackloom.topology import profiles

REQUESTS = st.builds(
    TemplateRequest,
    gpus=st.integers(1, 9),
    nics=st.integers(1, 17),
    align=st.sampled_from(Align),
    pairs=st.booleans(),
    unaligned=st.booleans(),
)


@settings(max_examples=30)
@given(asked=REQUESTS, name=st.sampled_from(profiles.machine_names()))
def test_any_counts_on_any_machine(stock_of, asked, name):
    try:
        made = generate_template(asked, stock_of(name))
    except Refused as refused:
        if refused.nearest_fix is not None:
            generate_template(_wished(refused.nearest_fix), stock_of(name))  # raises if the fix does not work
        return
    requests = made.template.spec.spec.devices.requests
    for kind, count in (("gpu", asked.gpus), ("nic", asked.nics)):
        assert sum(request.exactly.count for request in requests if request.name.startswith(kind)) == count
    gpus, nics = made.verified.devices[0]
    assert len(set(gpus)) == asked.gpus
    assert len(set(nics)) == asked.nics
    again = generate_template(asked, stock_of(name))
    assert msgspec.json.encode(again.template) == msgspec.json.encode(made.template)
    assert again.notes == made.notes


def _wished(fix):
    found = re.search(r"--gpus (\d+) --nics (\d+) --align (\w+)", fix)
    return TemplateRequest(
        gpus=int(found[1]),
        nics=int(found[2]),
        align=Align(found[3]),
        pairs="--pairs" in fix,
        unaligned="--unaligned" in fix,
    )
