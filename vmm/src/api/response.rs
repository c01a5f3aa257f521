//! What a client is answered, in the form that clients of Cloud Hypervisor rely on.
//!
//! Some of them take all that is between `HTTP/1.1 ` and the end of the line for the status, look for `Content-Length` in exactly
//! this case, and read no more than one segment of an answer that may hold anything but ASCII. So there is no reason phrase,
//! header names are in title case, and JSON is escaped.

use std::fmt::Write as _;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::ext::ReasonPhrase;
use hyper::header::{ALLOW, CONNECTION, CONTENT_TYPE, HeaderValue, SERVER};
use hyper::{Response, StatusCode};

use crate::api::request::Refusal;
use crate::api::{Failure, FailureKind, Reply};

const SERVER_NAME: &str = "Cloud Hypervisor API";
const JSON: &str = "application/json";
/// The type of Prometheus' text form.
const METRICS: &str = "text/plain; version=0.0.4";

/// An answer, before it is HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    pub status: StatusCode,
    /// The only method of the path, if that is what is wrong.
    pub allow: Option<&'static str>,
    /// The body and its type; 204 has none.
    pub body: Option<(String, &'static str)>,
    /// Whether the client is told that this was the last answer.
    pub close: bool,
}

impl Answer {
    fn new(status: StatusCode) -> Self {
        Self { status, allow: None, body: None, close: false }
    }

    /// The answer to a request that was applied, or could not be.
    pub fn outcome(outcome: Result<Reply, Failure>) -> Self {
        match outcome {
            Ok(Reply::Done) => Self::new(StatusCode::NO_CONTENT),
            Ok(Reply::Ok) => Self { body: Some((String::new(), JSON)), ..Self::new(StatusCode::OK) },
            Ok(Reply::Json(text)) => Self { body: Some((ascii(&text), JSON)), ..Self::new(StatusCode::OK) },
            Ok(Reply::Metrics(text)) => Self { body: Some((text, METRICS)), ..Self::new(StatusCode::OK) },
            Err(failure) => Self::error(status(failure.kind), &failure.chain),
        }
    }

    /// The answer to a request that is no action.
    pub fn refusal(refusal: &Refusal) -> Self {
        match refusal {
            Refusal::Method { allow } => {
                let chain = [format!("this path has the method {allow} only")];
                Self { allow: Some(allow), ..Self::error(StatusCode::METHOD_NOT_ALLOWED, &chain) }
            }
            Refusal::Failure(failure) => Self::error(status(failure.kind), &failure.chain),
        }
    }

    /// An error: an array of strings, the outermost first.
    pub fn error(status: StatusCode, chain: &[String]) -> Self {
        // An array of strings is always JSON.
        let text = serde_json::to_string(chain).unwrap_or_default();
        Self { body: Some((ascii(&text), JSON)), ..Self::new(status) }
    }

    /// The answer for hyper, which adds the length.
    pub fn into_http(self) -> Response<Full<Bytes>> {
        let connection = HeaderValue::from_static(if self.close { "close" } else { "keep-alive" });
        let (body, content_type) = self.body.unzip();
        let mut response = Response::new(Full::from(body.unwrap_or_default()));
        *response.status_mut() = self.status;
        response.extensions_mut().insert(ReasonPhrase::from_static(b""));
        let headers = response.headers_mut();
        headers.insert(SERVER, HeaderValue::from_static(SERVER_NAME));
        headers.insert(CONNECTION, connection);
        if let Some(allow) = self.allow {
            headers.insert(ALLOW, HeaderValue::from_static(allow));
        }
        if let Some(content_type) = content_type {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        }
        response
    }

    /// The answer as bytes, for what hyper takes for no request at all.
    pub fn into_bytes(self) -> Vec<u8> {
        let (body, content_type) = self.body.unwrap_or_default();
        format!(
            "HTTP/1.1 {} \r\nServer: {SERVER_NAME}\r\nConnection: close\r\nContent-Type: {content_type}\r\n\
             Content-Length: {}\r\n\r\n{body}",
            self.status.as_u16(),
            body.len(),
        )
        .into_bytes()
    }
}

const fn status(kind: FailureKind) -> StatusCode {
    match kind {
        FailureKind::BadRequest => StatusCode::BAD_REQUEST,
        FailureKind::NotFound => StatusCode::NOT_FOUND,
        FailureKind::Conflict => StatusCode::CONFLICT,
        FailureKind::TooManyRequests => StatusCode::TOO_MANY_REQUESTS,
        FailureKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        FailureKind::NotImplemented => StatusCode::NOT_IMPLEMENTED,
    }
}

/// `json` with what is not ASCII escaped: outside of strings JSON has no such characters.
fn ascii(json: &str) -> String {
    if json.is_ascii() {
        return json.to_string();
    }
    let mut escaped = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        if c.is_ascii() {
            escaped.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            let _ = write!(escaped, "\\u{unit:04x}");
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_ascii_is_escaped_and_means_the_same() {
        for text in ["", "plain", "naïve", "日本 \u{1F980}", "\u{7f}\u{80}"] {
            let json = serde_json::to_string(text).unwrap();
            let escaped = ascii(&json);
            assert!(escaped.is_ascii(), "{escaped}");
            assert_eq!(serde_json::from_str::<String>(&escaped).unwrap(), text);
        }
    }
}
