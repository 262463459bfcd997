//! The server's chat page, in a browser: Debian's chromium with its driver.

use std::process::Command;

use crate::common::folder::repository;
use crate::common::http::Server;

#[test]
fn the_chat_page_works_in_a_browser() {
    if !Command::new("chromedriver").arg("--version").output().is_ok_and(|output| output.status.success()) {
        anec::base::skipped("the chat page: chromedriver isn't installed (Debian: chromium-driver)");
        return;
    }
    let python = std::env::var_os("ANEC_PYTHON").unwrap_or_else(|| "python3".into());
    let demo = crate::verbs::bundle();
    let several = ["--name", "demo", "--name", "other", demo.to_str().unwrap()];
    for options in [&[][..], &several] {
        let server = Server::start(demo, options);
        let page = format!("http://{}", server.address);
        let output = Command::new(&python).arg(repository("tests/chat_page.py")).arg(page).output().unwrap();
        let [printed, said] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        assert!(output.status.success() && printed.contains("chat page: ok"), "{printed}{said}");
    }
}
