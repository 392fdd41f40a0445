"""The embedded model as an application, for `serve build`, which takes no builder."""

from deployment.app import build
from deployment.settings import AppArgs

application = build(AppArgs())
