# A Prefect worker with everything but SGLang. Build from the project root:
#   docker build -f docker/worker.Dockerfile -t eagle3-worker .
FROM python:3.11-slim
WORKDIR /srv/eagle3
COPY constraints.txt requirements-no-deps.txt pyproject.toml README.md LICENSE ./
COPY eagle3 eagle3
COPY tasks tasks
COPY flows flows
COPY deployments deployments
COPY examples examples
COPY prefect.yaml ./
RUN pip install --no-cache-dir -c constraints.txt torch==2.13.0 \
 && pip install --no-cache-dir -c constraints.txt -e '.[train]' \
 && pip install --no-cache-dir --no-deps -r requirements-no-deps.txt
ENV PREFECT_RESULTS_DEFAULT_SERIALIZER=json DO_NOT_TRACK=1
CMD ["prefect", "worker", "start", "--pool", "eagle3-cpu", "--type", "process"]
