//! HTTP answers, in the form that Cloud Hypervisor's clients rely on.
//!
//! Some clients take everything between `HTTP/1.1 ` and the end of the line for the status, search for `Content-Length`
//! with exactly this capitalisation, or read only one segment of an answer with non-ASCII characters. So there is no
//! reason phrase, header names are in title case, and JSON is escaped to ASCII.

use std::fmt::Write as _;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::ext::ReasonPhrase;
use hyper::header::{ALLOW, CONNECTION, CONTENT_TYPE, HeaderValue, SERVER};
use hyper::{Response, StatusCode};
use vm_api::config::error::shortened;

use crate::api::request::Refusal;
use crate::api::{Failure, Reply};
use crate::error_kind::ErrorKind;

const SERVER_NAME: &str = "Cloud Hypervisor API";
const JSON: &str = "application/json";
/// The content type of Prometheus' text format.
const METRICS: &str = "text/plain; version=0.0.4";

/// The most characters of a line of an error: a message with the longest path.
const LONGEST_LINE: usize = 5000;

/// An HTTP answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    pub status: StatusCode,
    /// The endpoint's only method, if the request had another.
    pub allow: Option<&'static str>,
    /// The body and its type; 204 has none.
    pub body: Option<(String, &'static str)>,
    /// True if the connection closes after this answer.
    pub close: bool,
}

impl Answer {
    fn new(status: StatusCode) -> Self {
        Self { status, allow: None, body: None, close: false }
    }

    /// The answer to an action.
    pub(super) fn outcome(outcome: Result<Reply, Failure>) -> Self {
        match outcome {
            Ok(Reply::Done) => Self::new(StatusCode::NO_CONTENT),
            Ok(Reply::Ok) => Self { body: Some((String::new(), JSON)), ..Self::new(StatusCode::OK) },
            Ok(Reply::Json(text)) => Self { body: Some((ascii(&text), JSON)), ..Self::new(StatusCode::OK) },
            Ok(Reply::Metrics(text)) => Self { body: Some((text, METRICS)), ..Self::new(StatusCode::OK) },
            Err(failure) => Self::error(status(failure.kind), &failure.chain),
        }
    }

    /// The answer to a request that is not turned into an action.
    pub(super) fn refusal(refusal: &Refusal) -> Self {
        match refusal {
            Refusal::Method { allow } => {
                let chain = [format!("this endpoint supports only {allow}")];
                Self { allow: Some(allow), ..Self::error(StatusCode::METHOD_NOT_ALLOWED, &chain) }
            }
            Refusal::Failure(failure) => Self::error(status(failure.kind), &failure.chain),
        }
    }

    /// An error: an array of strings, the outermost first. Long names from the request are shortened.
    pub(super) fn error(status: StatusCode, chain: &[String]) -> Self {
        let chain: Vec<_> = chain.iter().map(|line| shortened(line, LONGEST_LINE)).collect();
        // Serializing an array of strings cannot fail.
        let text = serde_json::to_string(&chain).unwrap_or_default();
        Self { body: Some((ascii(&text), JSON)), ..Self::new(status) }
    }

    /// The answer for hyper, which adds `Content-Length`.
    pub(super) fn into_http(self) -> Response<Full<Bytes>> {
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

    /// The answer as bytes, for input that hyper does not accept as a request.
    pub(super) fn into_bytes(self) -> Vec<u8> {
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

fn status(kind: ErrorKind) -> StatusCode {
    StatusCode::from_u16(kind.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

/// `json` with non-ASCII characters escaped: JSON has them only in strings.
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
    fn other_text_than_ascii_is_escaped_and_means_the_same() {
        for text in ["", "plain", "naïve", "日本 \u{1F980}", "\u{7f}\u{80}"] {
            let json = serde_json::to_string(text).unwrap();
            let escaped = ascii(&json);
            assert!(escaped.is_ascii(), "{escaped}");
            assert_eq!(serde_json::from_str::<String>(&escaped).unwrap(), text);
        }
    }
}
