"""A W&B server on loopback: as much of it as `wandb sync` and wandb.Api ask for."""

import gzip
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USER = {"id": "1", "username": "someone", "entity": "team", "flags": "{}", "teams": {"edges": []}}
PROJECT = {"id": "1", "name": "project", "entity": {"id": "1", "name": "team"}}


class WandbServer(ThreadingHTTPServer):
    """Keeps the runs that it is sent, in memory."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: dict[str, dict[str, Any]] = {}  # id -> name, state, config, summary, history

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def run(self, run_id: str) -> dict[str, Any]:
        new = {"name": run_id, "state": "running", "config": "{}", "summary": "{}", "history": []}
        return self.runs.setdefault(run_id, new)

    def add(
        self,
        run_id: str,
        info: dict[str, Any],
        results: dict[str, Any],
        metrics: list[dict[str, Any]],
    ) -> None:
        """Keep a run as if it had been tracked; W&B drops the nulls of a summary."""
        self.runs[run_id] = {
            "name": info["args"]["run_name"],
            "state": "finished",
            "config": json.dumps({name: {"value": x} for name, x in info.items()}),
            "summary": json.dumps({name: x for name, x in results.items() if x is not None}),
            "history": [json.dumps(row | {"_step": i}) for i, row in enumerate(metrics)],
        }

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the data that answers a GraphQL query."""
        words = query.replace("#graphql", "").replace("(", " ").split()
        match words[1]:
            case "Viewer" | "GetDefaultEntity":
                return {"viewer": USER}
            case "RunResumeStatus":
                ids = {"id": "1", "name": "project", "entity": PROJECT["entity"]}
                return {"model": ids | {"bucket": self.resume_status(variables["name"])}}
            case "UpsertBucket":
                return {"upsertBucket": {"bucket": self.upsert(variables), "inserted": True}}
            case "OrganizationCoreWeaveOrganizationID":
                return {"entity": None}
            case "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            case "CreateRunFiles":
                files = [{"name": x, "uploadUrl": self.url} for x in variables["files"]]
                return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
            case "Runs":
                return {"project": self.page()}
            case "RunHistoryKeys":
                return {"project": {"run": {"historyKeys": self.keys(variables["name"])}}}
            case "RunParquetHistory":
                rows = [{"_step": i} for i in range(len(self.run(variables["runName"])["history"]))]
                history = {"parquetUrls": [], "liveData": rows}
                return {"project": {"run": {"parquetHistory": history}}}
            case "HistoryPage":
                part = slice(variables["minStep"], variables["maxStep"])
                return {
                    "project": {"run": {"history": self.run(variables["run"])["history"][part]}}
                }
        raise ValueError(query)

    def resume_status(self, run_id: str) -> dict[str, Any] | None:
        """Return where a run has stopped, or None for one that is new."""
        if run_id not in self.runs:
            return None
        run = self.run(run_id)
        status = {"id": "1", "name": run_id, "displayName": run["name"], "config": run["config"]}
        status |= {"summaryMetrics": run["summary"], "historyTail": json.dumps(run["history"][-1:])}
        status |= {"historyLineCount": len(run["history"]), "logLineCount": 0, "tags": []}
        return status | {"eventsLineCount": 0, "eventsTail": "[]", "wandbConfig": '{"t": 1}'}

    def upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.run(variables["name"])
        run["name"] = variables["displayName"] or run["name"]
        run["config"] = variables["config"] or run["config"]
        names = {"name": variables["name"], "displayName": run["name"], "project": PROJECT}
        empty = {"description": None, "config": "{}", "sweepName": None, "historyLineCount": 0}
        return {"id": "1"} | names | empty

    def keys(self, run_id: str) -> dict[str, Any]:
        rows = [json.loads(row) for row in self.run(run_id)["history"]]
        keys = {name: {"typeCounts": [{"type": "number"}]} for row in rows for name in row}
        return {"sets": [], "keys": keys, "lastStep": len(rows) - 1}

    def page(self) -> dict[str, Any]:
        edges = [{"node": self.node(run_id), "cursor": run_id} for run_id in self.runs]
        runs = {"edges": edges, "pageInfo": {"endCursor": None, "hasNextPage": False}}
        return {"internalId": "1", "runCount": len(edges), "readOnly": False, "runs": runs}

    def node(self, run_id: str) -> dict[str, Any]:
        run, day = self.run(run_id), "2026-01-01T00:00:00"
        node = {"id": run_id, "name": run_id, "displayName": run["name"], "state": run["state"]}
        node |= {"config": run["config"], "summaryMetrics": run["summary"], "systemMetrics": "{}"}
        node |= {"historyKeys": self.keys(run_id), "historyLineCount": len(run["history"])}
        node |= dict.fromkeys(("sweepName", "group", "jobType", "commit", "notes"))
        node |= {"createdAt": day, "heartbeatAt": day, "description": "", "tags": []}
        return node | {"readOnly": False, "projectId": "1", "user": USER}

    def stream(self, run_id: str, body: dict[str, Any]) -> None:
        """Take what a run logs, in lines, and its end."""
        run, files = self.run(run_id), body.get("files", {})
        run["history"] += files.get("wandb-history.jsonl", {}).get("content", [])
        run["summary"] = files.get("wandb-summary.json", {}).get("content", [run["summary"]])[-1]
        if body.get("complete"):
            run["state"] = "finished" if body["exitcode"] == 0 else "failed"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandbServer  # ty: ignore[incompatible-mutable-override]

    def do_POST(self) -> None:
        body = json.loads(self.read())
        if "file_stream" in self.path:
            self.server.stream(self.path.split("/")[-2], body)
            return self.reply({})
        return self.reply({"data": self.server.answer(body["query"], body.get("variables") or {})})

    def do_PUT(self) -> None:
        self.read()
        self.reply({})

    def read(self) -> bytes:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        return gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body

    def reply(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""
