//! Lines of the guest: each is a request, and has a reply.

use serde::Deserialize;
use serde_json::Value;
use vm_api::channel::{Command, MAX_REPLY, MAX_REQUEST, Refusal, RefusalCode, Reply, Request};
use vm_api::config::error::shortened;

use super::{Instance, guest_notices};
use crate::vm::Vm;

/// The most characters of an error of a line.
const LONGEST_REASON: usize = 200;
/// Refusal of a change of a VM that is being sent.
const IS_SENT: &str = "the VM is being moved to another host; try again afterwards";

/// The number of a line that is otherwise no request.
#[derive(Deserialize)]
struct Numbered {
    id: u64,
}

impl Instance {
    /// Carries out one request of the guest, if any waits. More wait for the next turn of the control loop, which
    /// others have in the meantime. `is_sent` is true while the VM is sent to another host, which must not change it.
    pub(crate) fn answer_guest(&mut self, is_sent: bool) {
        let Some(channel) = self.vm().and_then(Vm::channel).cloned() else { return };
        let Some(line) = channel.take() else { return };
        let reply = reply(line.bytes.as_deref(), |command| match command {
            Command::Set(_) | Command::Reset(_) if is_sent => Err(refusal(RefusalCode::Failed, IS_SENT)),
            command => self.guest_request(command),
        });
        channel.answer(line.opening, reply);
    }
}

/// The reply to a line, as a line. `line` is `None` for one that was too long. `perform` carries out its command.
fn reply(line: Option<&[u8]>, perform: impl FnOnce(Command) -> Result<Value, Refusal>) -> Vec<u8> {
    let (id, result) = match line {
        None => (None, Err(invalid(format!("a line of more than {MAX_REQUEST} bytes; send shorter ones")))),
        Some(line) => match serde_json::from_slice::<Request>(line) {
            Ok(request) => {
                let id = request.id;
                let one = "give one of hello, list, get, set and reset";
                (Some(id), request.command().ok_or_else(|| invalid(one.to_string())).and_then(perform))
            }
            Err(error) => {
                let id = serde_json::from_slice(line).ok().map(|Numbered { id }| id);
                let reason = error.to_string();
                (id, Err(invalid(format!("the line is no request: {}", shortened(&reason, LONGEST_REASON)))))
            }
        },
    };
    let reply = match result {
        Ok(ok) => Reply { id, ok: Some(ok), error: None },
        Err(error) => Reply { id, ok: None, error: Some(error) },
    };
    guest_notices::line(&reply).unwrap_or_else(|| {
        let error = refusal(RefusalCode::Failed, &format!("the answer has more than {MAX_REPLY} bytes; ask for less"));
        guest_notices::line(&Reply { id, ok: None, error: Some(error) }).unwrap_or_else(|| b"{}\n".to_vec())
    })
}

fn invalid(message: String) -> Refusal {
    Refusal { code: RefusalCode::Invalid, message }
}

fn refusal(code: RefusalCode, message: &str) -> Refusal {
    Refusal { code, message: message.to_string() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(line: Option<&[u8]>) -> (Option<u64>, RefusalCode, String) {
        let text = reply(line, |_| panic!("no request"));
        assert_eq!(text.iter().filter(|byte| **byte == b'\n').count(), 1);
        let Reply { id, ok, error } = serde_json::from_slice(&text).unwrap();
        let Refusal { code, message } = error.unwrap();
        assert_eq!(ok, None);
        (id, code, message)
    }

    #[test]
    fn a_request_is_answered_with_its_number() {
        let ask = |result: Result<Value, Refusal>| {
            let text = reply(Some(br#"{"id":7,"hello":{"version":1}} "#), |command| {
                assert!(matches!(command, Command::Hello(_)));
                result
            });
            String::from_utf8(text).unwrap()
        };
        assert_eq!(ask(Ok(json!({"version": 1}))), "{\"id\":7,\"ok\":{\"version\":1}}\n");
        let denied = Err(refusal(RefusalCode::Denied, "vlan=300: the host allows 100-199"));
        let expected = r#"{"id":7,"error":{"code":"denied","message":"vlan=300: the host allows 100-199"}}"#;
        assert_eq!(ask(denied), format!("{expected}\n"));
        let long = ask(Ok(json!("x".repeat(MAX_REPLY))));
        assert!(long.starts_with(r#"{"id":7,"error":{"code":"failed","message":"the answer has more than 16384"#));
    }

    #[test]
    fn a_line_that_is_no_request_is_refused_in_a_short_line() {
        let long = format!(r#"{{"id":9,"{}":1}}"#, "\\u0001".repeat(600));
        let nested = [b'['; MAX_REQUEST];
        let lines: [(&[u8], Option<u64>); 9] = [
            (b"", None),
            (b"\xff\xfe\x00", None),
            (b"{\"id\":3", None),
            (br#"{"id":3}"#, Some(3)),
            (br#"{"id":4,"trust":{}}"#, Some(4)),
            (br#"{"id":5,"get":{"vf":"a"},"reset":{"vf":"a"}}"#, Some(5)),
            (br#"{"id":-1,"hello":{"version":1}}"#, None),
            (long.as_bytes(), Some(9)),
            (&nested, None),
        ];
        for (line, number) in lines {
            let (id, code, message) = refused(Some(line));
            assert_eq!((id, code), (number, RefusalCode::Invalid), "{message}");
            assert!(message.chars().count() < 300 && !message.contains('\n'), "{message}");
        }
        let (id, code, message) = refused(None);
        assert_eq!((id, code), (None, RefusalCode::Invalid));
        assert_eq!(message, "a line of more than 4096 bytes; send shorter ones");
    }
}
