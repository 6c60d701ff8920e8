PYTHON ?=
export PYTHON
.PHONY: check
check:
	@scripts/fork check
