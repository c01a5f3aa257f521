//! Turns hyper's requests into answers. The [`Handler`] is called on the thread that owns the connection.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::header::{CONNECTION, EXPECT, TRANSFER_ENCODING};
use hyper::{Request, Response, Version};
use parking_lot::Mutex;

use crate::api::exchange::{Budget, Exchange, LargeBody, Phase, SMALL_BODY};
use crate::api::response::Answer;
use crate::api::{Action, Failure, Handler};
use crate::api::{read_only, request};
use crate::error_kind::ErrorKind;

/// The largest body, in bytes, as in Cloud Hypervisor.
pub const MOST_BODY: usize = 4 << 20;
/// The most bytes read and discarded of a refused body, so that the client reads the answer.
const MOST_READ: usize = 64 << 20;

/// Answers requests.
pub(crate) struct Service {
    pub handler: Arc<dyn Handler>,
    /// True if clients are readers.
    pub is_read_only: bool,
    pub budget: Arc<Budget>,
    /// The time limit for a client to send a request, and to receive its answer.
    pub patience: Duration,
}

impl Service {
    /// The action of a request, or its refusal.
    fn action(&self, request: request::Request<'_>) -> Result<Action, Answer> {
        let refused = || read_only::refused(request.method, request.path);
        match self.is_read_only.then(refused).flatten() {
            Some(answer) => Err(answer),
            None => request.action().map_err(|refusal| Answer::refusal(&refusal)),
        }
    }

    /// Performs an action.
    fn perform(&self, action: Action) -> Answer {
        let outcome = self.handler.handle(action);
        Answer::outcome(if self.is_read_only { outcome.map(read_only::without_secrets) } else { outcome })
    }
}

/// Answers one request. Waits only for the rest of its body.
pub(crate) async fn answer(
    service: Arc<Service>,
    exchange: Arc<Mutex<Exchange>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let close = head.version != Version::HTTP_11 || wants(&head.headers, CONNECTION, "close");
    let waits = wants(&head.headers, EXPECT, "100-continue");
    let mut length = 0;
    let body = receive(body, waits, &service.budget, &mut length).await;
    let is_read = body.is_ok();
    let fds = exchange.lock().descriptors.take();
    let answer = match (body, fds) {
        (Err(refused), _) => Answer::outcome(Err(refused)),
        (_, Err(lost)) => Answer::outcome(Err(lost.into())),
        (Ok(received), Ok((fds, passed))) => {
            // No endpoint accepts a query: with one, the path is not found.
            let path = head.uri.path_and_query().map_or("", |path| path.as_str());
            let Received { bytes, large } = received;
            let turn = (!bytes.is_empty()).then(|| service.budget.turn());
            let request = request::Request { method: head.method.as_str(), path, body: &bytes, fds };
            let action = service.action(request);
            drop((bytes, turn));
            let answer = action.map_or_else(|refused| refused, |action| service.perform(action));
            drop((large, passed));
            answer
        }
    };
    // A refused body has used memory as well while it was read.
    service.budget.done(length);
    let mut exchange = exchange.lock();
    exchange.phase = Phase::Answering(Instant::now());
    exchange.is_unsent = true;
    exchange.has_answered = true;
    let close = close || !is_read;
    let mut response = Answer { close, ..answer }.into_http();
    if !close && head.headers.contains_key(TRANSFER_ENCODING) {
        // If the request had a length as well, hyper closes the connection (`RFC 9112 §6.3`) and adds "close" to this
        // header. Only hyper has this information. Without the header, the connection stays open.
        response.headers_mut().remove(CONNECTION);
    }
    Ok(response)
}

/// True if the header lists this word, case-insensitively.
fn wants(headers: &hyper::HeaderMap, name: hyper::header::HeaderName, word: &str) -> bool {
    let words = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    words.flat_map(|value| value.split(',')).any(|value| value.trim().eq_ignore_ascii_case(word))
}

/// A received body.
struct Received {
    bytes: Vec<u8>,
    /// The permit, if the body is large.
    large: Option<LargeBody>,
}

/// Receives a body. A refused body is still read, so that the client reads the answer, unless the client `waits` for
/// 100 Continue. Sets `read` to the number of bytes read.
async fn receive(mut body: Incoming, waits: bool, budget: &Arc<Budget>, read: &mut usize) -> Result<Received, Failure> {
    let too_large = || bad(format!("the body is larger than {} MiB", MOST_BODY >> 20));
    if waits && body.size_hint().lower() > MOST_BODY as u64 {
        return Err(too_large());
    }
    let (mut bytes, mut large) = (Vec::new(), None);
    let mut refused = None;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| bad(format!("the body is malformed: {error}")))?;
        let Ok(data) = frame.into_data() else { continue };
        *read += data.len();
        if *read > MOST_READ {
            break;
        }
        if refused.is_none() && *read > MOST_BODY {
            refused = Some(too_large());
        }
        if refused.is_none() && *read > SMALL_BODY && large.is_none() {
            large = budget.large_body();
            refused = large.is_none().then(|| {
                let what = "too many requests with large bodies at the same time; try again";
                Failure::new(ErrorKind::Busy, what)
            });
        }
        match refused {
            None => bytes.extend_from_slice(&data),
            Some(_) => (bytes, large) = (Vec::new(), None),
        }
    }
    match refused {
        None => Ok(Received { bytes, large }),
        Some(refused) => Err(refused),
    }
}

fn bad(reason: impl Into<String>) -> Failure {
    Failure::new(ErrorKind::Invalid, reason)
}
