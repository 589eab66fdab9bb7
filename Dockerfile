FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY router ./router
COPY gateway ./gateway
COPY replica ./replica
RUN WARMROUTE_COMPILE=require pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
RUN python -m venv /opt/warmroute \
 && /opt/warmroute/bin/pip install --no-cache-dir "$(echo /wheels/*.whl)[auth,events,otel,postgres,store]" \
 && /opt/warmroute/bin/pip uninstall --yes setuptools pip

FROM python:3.11-slim
RUN mkdir --mode 1777 /var/lib/warmroute
COPY --from=build /opt/warmroute /opt/warmroute
# The bytecode was compiled by pip above. The user has no home: below XDG_STATE_HOME is what clients ask to be kept, and what the
# gateway knows. With a volume at /var/lib/warmroute, XDG_STATE_HOME=/var/lib.
ENV PATH=/opt/warmroute/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    WARMROUTE_LISTEN=0.0.0.0:8000 \
    XDG_STATE_HOME=/tmp
USER 65532:65532
EXPOSE 8000
ENTRYPOINT ["warmroute"]
CMD ["serve", "--config", "/etc/warmroute/config.yaml"]
