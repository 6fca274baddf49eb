"""The Helm chart on its own: lint, versions, values that it refuses, and its copy of the alerts."""

from __future__ import annotations

import pytest
import yaml
from deployed import CHART, DEPLOY, EVERYTHING, KUBERNETES, helm, need, run

from kvindexd._version import __version__


def test_the_chart_is_of_this_version_and_clean() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)
    overlay = yaml.safe_load(
        (KUBERNETES / "overlays" / "production" / "kustomization.yaml").read_text()
    )
    assert overlay["images"][0]["newTag"] == __version__
    done = run(need("helm"), "lint", "--strict", CHART, "--set=valkey.enabled=true")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("redis.urll=redis://h", "redis"),
        ("redis.url=http://h", "redis/url"),
        ("redis.url=redis://user:secret@h:6379", "redis/url"),
        ("scorer.autoscaling.minReplicas=0", "minReplicas"),
        ("auth.scoring=maybe", "scoring"),
    ],
)
def test_the_chart_refuses_wrong_values(value: str, said: str) -> None:
    done = run(need("helm"), "template", "x", CHART, "--set=valkey.enabled=true", f"--set={value}")
    assert done.returncode != 0
    assert said in done.stderr.replace(".", "/") or said in done.stderr


def test_alerts_are_those_of_prometheus() -> None:
    """deploy/generate.py has been run since the last change of alerts.yaml."""
    wanted = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    where = KUBERNETES / "components" / "monitoring" / "prometheusrule.yaml"
    rule = yaml.safe_load(where.read_text())
    assert rule["spec"]["groups"] == wanted, "run: python deploy/generate.py"
    chart = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    assert chart["groups"] == wanted, "run: python deploy/generate.py"
    (rendered,) = [o for o in helm(**EVERYTHING) if o["kind"] == "PrometheusRule"]
    assert rendered["spec"]["groups"] == wanted
