"""The application as Serve sees it, without starting Ray."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import yaml
from ray.serve.schema import ServeDeploySchema

from deployment.engine.options import EngineOptions
from deployment.settings import AppArgs

CONFIGS = Path(__file__).resolve().parents[2] / "deployment" / "configs"


def test_every_shipped_config_is_valid_for_serve_and_for_the_application():
    configs = sorted(CONFIGS.glob("*.yaml"))
    assert configs
    for path in configs:
        schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
        for application in schema.applications:
            assert application.import_path == "deployment.app:build"
            AppArgs.model_validate(application.args)


def test_every_engine_option_can_be_set_from_the_settings():
    names = {field.name for field in fields(EngineOptions)}
    assert names <= set(AppArgs.model_fields)
    options = AppArgs(lanes=3, context=100, pages=9, draft_tokens=5, draft_causal="true").engine_options()
    chosen = (options.lanes, options.context, options.pages, options.draft_tokens, options.draft_causal)
    assert chosen == (3, 100, 9, 5, "true")
