"""Engines that take retention hints are asked to keep the prompts of sessions longer than others."""
