# Stock SGLang with kvpolicy. Build it in the repository's root:
#   docker build -f examples/deploy/server.Dockerfile -t kvpolicy-server:0.1.0 .
ARG SGLANG=0.5.23
FROM lmsysorg/sglang:v${SGLANG}
COPY . /tmp/kvpolicy
RUN python3 -m pip install --no-deps --no-cache-dir --break-system-packages /tmp/kvpolicy \
    && rm -rf /tmp/kvpolicy
ENTRYPOINT ["python3", "-m", "sglang.launch_server"]
