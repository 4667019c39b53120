"""HAProxy and nginx of the distribution, with the configurations in `deploy/` in front of the engines of a test."""

import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.support.servers.child_process import RestartableServer, free_port

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


class LuaRouter(RestartableServer):
    """A router. Engine n is the worker `e{n}`."""

    def __init__(self, program: str, configure: "Configure", folder: Path, kvsight: str | None, engines: Sequence[str]):
        """kvsight: its address. None: the router asks nobody. engines: addresses."""
        if (found := shutil.which(program, path="/usr/sbin:/usr/bin")) is None:
            pytest.skip(f"{program} is missing: apt-get install {program}")
        self._port, self._log = free_port(), folder / f"{program}.log"
        self.url = f"http://127.0.0.1:{self._port}"
        hosts = {f"e{number}": each.partition("://")[2] for number, each in enumerate(engines)}
        self._command = [found, *configure(folder, self._port, kvsight and kvsight.partition("://")[2], hosts)]

    def restart(self) -> None:
        """Start or restart, and block until it listens."""
        self.start(self._command, self._log, self._port)


Configure = Callable[[Path, int, str | None, dict[str, str]], list[str]]
"""Writes a configuration: folder, port, kvsight, engines by name. Returns the arguments of the program."""


def _haproxy(folder: Path, port: int, kvsight: str | None, engines: dict[str, str]) -> list[str]:
    text = (DEPLOY / "haproxy/haproxy.cfg").read_text().replace("127.0.0.1:9000", f"127.0.0.1:{port}")
    text = text.replace("127.0.0.1:9001", f"127.0.0.1:{free_port()}")
    text = text.replace("lua-load-per-thread kvsight.lua", f"lua-load-per-thread {DEPLOY / 'haproxy/kvsight.lua'}")
    text = text.replace("server kvsight 127.0.0.1:8000", f"server kvsight {kvsight or '127.0.0.1:9'}")
    servers = "".join(f"    server {name} {at}\n" for name, at in engines.items())
    text, count = re.subn(r"(    server engine-.*\n)+", servers, text)
    assert count == 1
    if kvsight is None:
        text = "\n".join(line for line in text.splitlines() if "lua" not in line) + "\n"
    (folder / "haproxy.cfg").write_text(text)
    return ["-db", "-f", str(folder / "haproxy.cfg")]


def _nginx(folder: Path, port: int, kvsight: str | None, engines: dict[str, str]) -> list[str]:
    if not Path("/usr/lib/nginx/modules/ngx_http_lua_module.so").exists():
        pytest.skip("Lua is missing: apt-get install libnginx-mod-http-lua lua-cjson")
    text = (DEPLOY / "nginx/nginx.conf").read_text().replace("127.0.0.1:9000", f"127.0.0.1:{port}")
    text = text.replace("modules/", "/usr/lib/nginx/modules/").replace("/etc/nginx/?.lua", f"{DEPLOY}/nginx/?.lua")
    text = text.replace("port = 8000", f"port = {(kvsight or ':9').partition(':')[2]}")
    servers = "".join(f'["{name}"] = "{at}",\n' for name, at in engines.items())
    text, count = re.subn(r'(\s+\["engine-.*\n)+', f"\n{servers}", text)
    assert count == 1
    if kvsight is None:
        text = "\n".join(line for line in text.splitlines() if "_by_lua_block { kvsight" not in line)
        text = text.replace("server 0.0.0.1;  # never used", "".join(f"server {at};\n" for at in engines.values()))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    folders = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    (folder / "nginx.conf").write_text("user root;\ndaemon off;\n" + text.replace("http {\n", f"http {{\n{folders}"))
    return ["-p", str(folder), "-c", str(folder / "nginx.conf")]


HAProxy, Nginx = partial(LuaRouter, "haproxy", _haproxy), partial(LuaRouter, "nginx", _nginx)
"""`with HAProxy(folder, kvsight, engines) as router:`. Both skip the test if their packages are missing."""
