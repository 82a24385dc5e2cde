# The gateway: the version that was tried with kvpolicy.
FROM python:3.12-slim
RUN python3 -m pip install --no-cache-dir smg==1.13.0 \
    && useradd --system --no-log-init --uid 65532 smg
USER 65532
ENTRYPOINT ["smg", "launch"]
