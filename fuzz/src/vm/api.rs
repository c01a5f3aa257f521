//! A client's bytes on a connection of the REST API, and the actions that they request.
//!
//! Each reply must be HTTP that Cloud Hypervisor's clients can parse, and an error must be a list of lines. The same
//! bytes, split into other pieces, must cause the same actions and the same replies.

use std::sync::Arc;

use parking_lot::Mutex;
use vmm::ErrorKind;
use vmm::api::{Action, Failure, Handler, ROUTES, Reply};
use vmm::testing::converse;

use crate::input::{Input, Seed};

// The kinds of a part of the input.
const BYTES: u8 = 0;
const REQUEST: u8 = 1;
const CHUNKED: u8 = 2;
const KINDS: u8 = 3;

/// Records actions, and returns different results in turn.
#[derive(Default)]
struct Recorder(Mutex<Vec<String>>);

impl Handler for Recorder {
    fn handle(&self, action: Action) -> Result<Reply, Failure> {
        let mut actions = self.0.lock();
        actions.push(format!("{action:?}"));
        match actions.len() % 5 {
            0 => Ok(Reply::Ok),
            1 => Ok(Reply::Done),
            2 => Ok(Reply::Json("{\"a\": \"ä\"}".into())),
            3 => Ok(Reply::Metrics("m 1\n".into())),
            _ => Err(Failure::new(ErrorKind::Busy, "try again")),
        }
    }
}

/// The bytes of a request whose body resembles JSON.
fn request(input: &mut Input<'_>, chunked: bool) -> Vec<u8> {
    let (route, flags, len) = (input.u8(), input.u8(), usize::from(input.u16() % 512));
    let body = input.slice(len);
    let route = &ROUTES[usize::from(route) % ROUTES.len()];
    let method = if flags & 1 == 0 { route.method } else { "POST" };
    let close = if flags & 2 == 0 { "" } else { "Connection: close\r\n" };
    let head = format!("{method} {} HTTP/1.1\r\nHost: localhost\r\n{close}", route.path);
    if chunked {
        let head = format!("{head}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n", len.max(1));
        return [head.as_bytes(), if body.is_empty() { b" " } else { body }, b"\r\n0\r\n\r\n"].concat();
    }
    [format!("{head}Content-Length: {}\r\n\r\n", body.len()).as_bytes(), body].concat()
}

/// Sends `bytes` in pieces of `len` bytes. Returns the actions and the replies.
fn sent(bytes: &[u8], len: usize) -> (Vec<String>, String) {
    let handler = Arc::new(Recorder::default());
    let answers = converse(bytes.chunks(len.max(1)), handler.clone()).expect("a pair of sockets");
    let actions = std::mem::take(&mut *handler.0.lock());
    // Interim replies depend on how much of a body has already arrived, and are ignored.
    let answers = String::from_utf8(answers).expect("clients stop reading at other characters");
    (actions, answers.replace("HTTP/1.1 100 Continue\r\n\r\n", ""))
}

/// Runs `input`.
pub fn run(input: &[u8]) {
    run_to_end(input);
}

/// As [`run`]. Returns the number of actions, and the statuses of the replies.
fn run_to_end(input: &[u8]) -> (usize, Vec<u16>) {
    let mut input = Input::new(input);
    let piece = 1 + usize::from(input.u8());
    let mut bytes = Vec::new();
    while !input.is_empty() {
        match input.u8() % KINDS {
            BYTES => {
                let len = input.u8();
                bytes.extend(input.slice(len.into()));
            }
            kind => bytes.extend(request(&mut input, kind == CHUNKED)),
        }
    }
    let (actions, answers) = sent(&bytes, usize::MAX);
    let statuses = check(&answers);
    assert!(actions.len() <= statuses.len(), "an action without an answer");
    let (same_actions, same_answers) = sent(&bytes, piece);
    assert_eq!(same_actions, actions, "in pieces of {piece} bytes");
    // Bytes that are not a request get a reply as soon as that is known, and none if they end before.
    let (short, long) =
        if answers.len() < same_answers.len() { (answers, same_answers) } else { (same_answers, answers) };
    let rest = long.strip_prefix(&short).unwrap_or_else(|| panic!("in pieces of {piece} bytes: {short:?}, {long:?}"));
    assert!(matches!(check(rest)[..], [] | [400 | 431]), "in pieces of {piece} bytes: {rest:?}");
    (actions.len(), statuses)
}

/// Checks replies, and returns their statuses.
fn check(mut text: &str) -> Vec<u16> {
    let mut statuses = Vec::new();
    assert!(text.is_ascii(), "clients stop reading at other characters");
    while !text.is_empty() {
        let (head, rest) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("an answer without an end: {text:?}"));
        let mut lines = head.split("\r\n");
        // A client of HTTP/1.0 gets that version in the reply.
        let first =
            lines.next().and_then(|line| line.strip_prefix("HTTP/1.")?.split_at_checked(2)).map(|(_, rest)| rest);
        let first = first.unwrap_or_else(|| panic!("an answer begins so: {text:?}"));
        let status: u16 = first
            .strip_suffix(' ')
            .unwrap_or_else(|| panic!("an answer of hyper's own: {text:?}"))
            .parse()
            .expect("a status");
        let length = lines.find_map(|line| line.strip_prefix("Content-Length: "));
        let length = length.map_or(0, |length| length.parse().expect("a length"));
        let (body, rest) = rest.split_at_checked(length).expect("as much as it says");
        assert!((200..300).contains(&status) || (400..600).contains(&status), "status {status}");
        assert!(status != 500, "an error that a client causes is never a 500");
        if status >= 400 {
            let chain: Vec<String> = serde_json::from_str(body).expect("an error is a list of lines");
            assert!(!chain.is_empty(), "an error without a line");
            for line in chain {
                assert!(!line.is_empty() && !line.contains('\n'), "{line:?}");
            }
        }
        statuses.push(status);
        text = rest;
    }
    statuses
}

/// A request to `path` with this body.
fn asks(seed: Seed, kind: u8, path: &str, flags: u8, body: &str) -> Seed {
    let route = ROUTES.iter().position(|route| route.path.ends_with(path)).expect("an endpoint");
    seed.with([kind, route as u8, flags]).with((body.len() as u16).to_le_bytes()).with(body)
}

/// Seeds: requests with and without bodies, several at once, in chunks; wrong methods, paths and bodies; bytes that are
/// not a request.
pub fn seeds() -> Vec<Vec<u8>> {
    let start = |piece: u8| Seed::new().with([piece]);
    let vm = r#"{"payload": {"kernel": "/k"}, "net": [{"tap": "t", "sriov_vfs": 2}]}"#;
    let several = asks(asks(start(6), REQUEST, "vmm.ping", 0, ""), REQUEST, "vm.create", 0, vm);
    let several = asks(asks(several, CHUNKED, "vm.create", 0, vm), REQUEST, "vm.boot", 0, "");
    let several = asks(several, REQUEST, "/metrics", 2, "");
    let resized = asks(start(1), REQUEST, "vm.resize", 0, "{\"desired_vcpus\": 2}");
    let resized = asks(resized, CHUNKED, "vm.set-vf", 0, r#"{"pf": "a", "index": 1, "link": "down"}"#);
    let wrong = asks(asks(start(0), REQUEST, "vm.boot", 1, ""), REQUEST, "vm.boot", 0, "{}");
    let wrong = asks(asks(wrong, REQUEST, "vm.add-net", 0, ""), REQUEST, "vm.add-net", 0, "{\"fds\": [3]}");
    let wrong = asks(asks(wrong, REQUEST, "vm.snapshot", 0, "{}"), REQUEST, "vm.add-disk", 0, "[1,");
    let bytes = |text: &str| Seed::new().with([9, BYTES, text.len() as u8]).with(text);
    let nothing = bytes("GET /api/v1/vm.nothing HTTP/1.1\r\nHost: a\r\n\r\n");
    let old = bytes("GET /api/v1/vmm.ping HTTP/1.0\r\n\r\n");
    let expects =
        bytes("PUT /api/v1/vm.resize HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}");
    let noise = bytes("\x16\x03\x01 hello\r\n\r\n");
    let behind = bytes("GET /api/v1/vmm.ping HTTP/1.1\r\nHost: a\r\n\r\n\u{1} what is this?\r\n\r\n");
    let half = bytes("PUT /api/v1/vm.resize HTTP/1.1\r\nContent-Length: 10\r\n\r\n{");
    // hyper's text for it depends on how much has arrived.
    let other = bytes("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nGET / HTTP/1.0\r\n\r\n");
    [several, resized, wrong, nothing, old, expects, noise, half, behind, other].map(Seed::done).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_actions_and_errors() {
        let done: Vec<_> = seeds().iter().map(|seed| run_to_end(seed)).collect();
        let expected: [(usize, &[u16]); 10] = [
            (5, &[204, 200, 200, 429, 200]),
            (2, &[204, 200]),
            (0, &[405, 400, 400, 400, 400, 400]),
            (0, &[404]),
            (1, &[204]),
            (1, &[204]),
            (0, &[400]),
            (0, &[400]),
            (1, &[204, 400]),
            (0, &[400]),
        ];
        assert_eq!(done, expected.map(|(actions, statuses)| (actions, statuses.to_vec())));
    }
}
