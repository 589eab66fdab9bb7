#!/bin/bash
# Fetches real coding agents into DEST (default .clients) for `make test-clients`: Codex, OpenCode and Claude Code, and AI SDK, from npm,
# 1.1 GB.
# The agents are programs for this machine. None needs a network once it is here.
#
#   scripts/clients.sh [DEST]
set -euo pipefail

DEST=${1:-.clients}
command -v npm > /dev/null || { echo "clients: npm is needed (Debian: apt-get install npm)" >&2; exit 1; }

mkdir -p "$DEST"
cd "$DEST"
[ -f package.json ] || echo '{"private": true}' > package.json
npm install --no-audit --no-fund --loglevel=error @openai/codex@0.169.0 opencode-ai@1.18.33 @anthropic-ai/claude-code@2.1.331 \
    ai@6.0.326 @ai-sdk/openai@3.0.141 @ai-sdk/anthropic@3.0.140 @ai-sdk/openai-compatible@2.0.92
node node_modules/opencode-ai/postinstall.mjs
for agent in codex opencode claude; do
    echo "clients: $(node_modules/.bin/$agent --version 2> /dev/null | tail -1) ($agent)"
done
