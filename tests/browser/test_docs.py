"""The documentation page in a browser that cannot resolve any host name, as in a network without the internet."""

from playwright.async_api import Browser

from api.app import create_app
from api.server import running_server
from api.service import LiveService
from api.settings import ApiSettings
from tests.support.browser.chromium import new_page
from tests.support.log.hand_fed import HandFed


async def test_the_page_shows_every_route_and_asks_for_the_token(browser: Browser) -> None:
    settings = ApiSettings(port=0, api_token="s3cret")
    app = create_app(LiveService(HandFed().consumer, settings))
    async with running_server(app, settings) as url:
        page = await new_page(browser)
        await page.goto(f"{url}/docs")
        await page.wait_for_selector("button.btn.authorize")
        await page.wait_for_selector("[data-path='/health']")
        paths = await page.eval_on_selector_all("[data-path]", "all => all.map(each => each.dataset.path)")
    assert {path.replace("\u200b", "") for path in paths} == set(app.openapi()["paths"])
