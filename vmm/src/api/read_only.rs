//! The service of a socket for readers (`--read-only-socket`): all endpoints with GET, and no change.

use hyper::StatusCode;
use serde_json::Value;

use crate::api::Reply;
use crate::api::request::{ROUTES, Route};
use crate::api::response::Answer;

/// Settings of the VM that may have secrets of its guest, as paths in `vm.info`: readers do not get them.
const SECRETS: [&str; 2] = ["/config/payload/cmdline", "/config/platform/oem_strings"];

/// The answer to a request that readers may not make; `None` if they may, or if it is refused on any socket.
pub(super) fn refused(method: &str, path: &str) -> Option<Answer> {
    let is_change = |route: &&Route| route.path == path && route.method == method && method != "GET";
    ROUTES.iter().find(is_change)?;
    let name = path.rsplit('/').next().unwrap_or(path);
    let chain = [format!("{name}: this socket is read-only; use the socket of --api-socket")];
    Some(Answer::error(StatusCode::FORBIDDEN, &chain))
}

/// Leaves the guest's secrets out of a reply.
pub(super) fn without_secrets(reply: Reply) -> Reply {
    let Reply::Json(text) = reply else { return reply };
    let Ok(mut document) = serde_json::from_str::<Value>(&text) else { return Reply::Json("{}".to_string()) };
    for secret in SECRETS {
        let place = secret.rsplit_once('/');
        if let Some((owner, key)) = place.and_then(|(owner, key)| Some((document.pointer_mut(owner)?, key)))
            && let Some(fields) = owner.as_object_mut()
        {
            fields.remove(key);
        }
    }
    Reply::Json(document.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn exactly_the_endpoints_with_get_are_for_readers() {
        for route in ROUTES.iter() {
            let refused = refused(route.method, route.path).map(|answer| answer.status);
            let expected = (route.method != "GET").then_some(StatusCode::FORBIDDEN);
            assert_eq!(refused, expected, "{route:?}");
        }
        assert_eq!(refused("POST", "/api/v1/vm.boot"), None, "405 on any socket");
        assert_eq!(refused("PUT", "/api/v1/vm.info"), None, "405 on any socket");
        assert_eq!(refused("PUT", "/api/v1/vm.unknown"), None, "404 on any socket");
    }

    #[test]
    fn replies_have_no_secrets_and_are_otherwise_the_same() {
        let platform = json!({"oem_strings": ["io.systemd.credential:x=secret"], "uuid": "u"});
        let payload = json!({"kernel": "k", "cmdline": "password=secret"});
        let info = json!({"config": {"payload": payload, "platform": platform}, "state": "Running", "n": u64::MAX});
        let Reply::Json(text) = without_secrets(Reply::Json(info.to_string())) else { panic!("JSON") };
        assert!(!text.contains("secret"), "{text}");
        let expected = json!({"config": {"payload": {"kernel": "k"}, "platform": {"uuid": "u"}}, "state": "Running",
            "n": u64::MAX});
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), expected);
        for reply in [Reply::Done, Reply::Metrics("m 1\n".into()), Reply::Json(json!({"pid": 1}).to_string())] {
            assert_eq!(without_secrets(reply.clone()), reply);
        }
    }
}
