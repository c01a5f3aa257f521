//! A client's connection: hyper's HTTP over a non-blocking socket.
//!
//! There is no async runtime. The thread that owns a connection advances it as far as the received bytes allow, and
//! gets back the event that the connection waits for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use hyper::StatusCode;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::api::exchange::{Exchange, Phase};
use crate::api::response::Answer;
use crate::api::service::{self, Service};

/// The time limit for a client to send a request, from its first byte to its last, and to receive the answer.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// The longest request line and headers, in bytes.
pub const MOST_HEAD: usize = 16 << 10;
/// The most headers of a request.
const MOST_HEADERS: usize = 64;
/// The start of hyper's reply to a client that expects `100 Continue` before its body.
const CONTINUE: &[u8] = b"HTTP/1.1 100 ";
/// The start of hyper's answer to bytes that are not a request. Answers of this program have no reason phrase.
const REFUSALS: [&[u8]; 2] = [b"HTTP/1.1 400 B", b"HTTP/1.1 431 R"];

/// A client's connection.
pub(crate) struct Connection {
    http: Pin<Box<dyn Future<Output = hyper::Result<()>> + Send>>,
    stream: Arc<UnixStream>,
    exchange: Arc<Mutex<Exchange>>,
    patience: Duration,
    /// Time at which it was accepted.
    pub opened: Instant,
    /// Time at which it was last advanced.
    pub used: Instant,
}

/// Event that a connection waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// The next request.
    Request,
    /// The rest of a request, until the deadline.
    Rest(Instant),
    /// Room for the rest of an answer, until the deadline.
    Room(Instant),
}

impl Connection {
    /// A new connection; `service` answers its requests.
    ///
    /// # Errors
    ///
    /// Fails if the socket cannot be made non-blocking.
    pub(super) fn new(stream: UnixStream, service: &Arc<Service>) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let stream = Arc::new(stream);
        let exchange = Arc::new(Mutex::new(Exchange::new(service.budget.clone())));
        let socket = HyperIo { stream: stream.clone(), exchange: exchange.clone() };
        let patience = service.patience;
        let (service, shared) = (service.clone(), exchange.clone());
        let answer = service_fn(move |request| service::answer(service.clone(), shared.clone(), request));
        let http = http1::Builder::new()
            .title_case_headers(true)
            .auto_date_header(false)
            .half_close(true)
            .max_headers(MOST_HEADERS)
            .max_header_size(MOST_HEAD)
            .serve_connection(socket, answer);
        let opened = Instant::now();
        Ok(Self { http: Box::pin(http), stream, exchange, patience, opened, used: opened })
    }

    /// Reads, answers and writes as far as possible without waiting for the client. `None` at the end of the
    /// connection.
    pub(super) fn advance(&mut self) -> Option<Wait> {
        let woken = Arc::new(WakeFlag(AtomicBool::new(true)));
        let waker = Waker::from(woken.clone());
        while woken.0.swap(false, Ordering::Relaxed) {
            match self.http.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(Ok(())) => return None,
                Poll::Ready(Err(error)) => {
                    self.refuse(&error);
                    return None;
                }
                Poll::Pending => {}
            }
        }
        self.used = Instant::now();
        let mut exchange = self.exchange.lock();
        Some(match exchange.phase {
            Phase::Answering(since) if exchange.is_unsent => Wait::Room(since + self.patience),
            Phase::Receiving(since) => Wait::Rest(since + self.patience),
            Phase::Answering(_) | Phase::Idle => {
                exchange.phase = Phase::Idle;
                Wait::Request
            }
        })
    }

    /// True if a request was answered on this connection.
    pub(super) fn has_answered(&self) -> bool {
        self.exchange.lock().has_answered
    }

    /// Answers bytes that are not an HTTP request.
    fn refuse(&self, error: &hyper::Error) {
        {
            let exchange = self.exchange.lock();
            if !error.is_parse() || matches!(exchange.phase, Phase::Answering(_)) && !exchange.is_refused {
                return;
            }
        }
        let (status, what) = match error.is_parse_too_large() {
            true => (
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                format!("the request line and headers exceed {MOST_HEAD} bytes or {MOST_HEADERS} headers"),
            ),
            false => {
                // The text in brackets depends on how many of the bytes have arrived.
                let error = error.to_string();
                let error = error.split(" (").next().unwrap_or(&error);
                (StatusCode::BAD_REQUEST, format!("this is not an HTTP/1.1 request: {error}"))
            }
        };
        // The client may have disconnected.
        let _ = send(&*self.stream, &Answer::error(status, &[what]).into_bytes(), SEND);
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Set when a connection can continue at once: hyper yields to give other tasks a turn.
struct WakeFlag(AtomicBool);

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

const SEND: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);

/// The socket, with hyper's I/O traits.
struct HyperIo {
    stream: Arc<UnixStream>,
    exchange: Arc<Mutex<Exchange>>,
}

impl Read for HyperIo {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        mut buffer: ReadBufCursor<'_>,
    ) -> Poll<Result<(), io::Error>> {
        let mut bytes = [0; 8 << 10];
        let room = buffer.remaining().min(bytes.len());
        let Some(room) = bytes.get_mut(..room) else { return Poll::Ready(Ok(())) };
        let mut exchange = self.exchange.lock();
        let received = match exchange.descriptors.receive(&*self.stream, room) {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => return Poll::Pending,
            Err(error) => return Poll::Ready(Err(error.into())),
        };
        // The next request may arrive while this one's answer is being sent.
        let is_between = match exchange.phase {
            Phase::Idle => true,
            Phase::Receiving(_) => false,
            Phase::Answering(_) => !exchange.is_unsent,
        };
        if received > 0 && is_between {
            exchange.phase = Phase::Receiving(Instant::now());
        }
        buffer.put_slice(room.get(..received).unwrap_or_default());
        Poll::Ready(Ok(()))
    }
}

impl Write for HyperIo {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize, io::Error>> {
        let mut exchange = self.exchange.lock();
        // hyper's own answer to bytes that are not a request has a reason phrase and no explanation. It is dropped
        // here; `Connection::refuse` answers instead.
        if !matches!(exchange.phase, Phase::Answering(_)) && !bytes.starts_with(CONTINUE) {
            return Poll::Ready(Ok(bytes.len()));
        }
        // Likewise right after a completely sent answer: the invalid bytes arrived with its request.
        if !exchange.is_unsent && REFUSALS.iter().any(|refusal| bytes.starts_with(refusal)) {
            exchange.is_refused = true;
            return Poll::Ready(Ok(bytes.len()));
        }
        exchange.is_unsent = true;
        let sent = send(&*self.stream, bytes, SEND);
        match sent {
            Ok(count) => Poll::Ready(Ok(count)),
            Err(Errno::AGAIN | Errno::INTR) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error.into())),
        }
    }

    /// Called when all bytes have been written.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<(), io::Error>> {
        self.exchange.lock().is_unsent = false;
        Poll::Ready(Ok(()))
    }

    /// Does nothing: the socket is closed with the connection.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<(), io::Error>> {
        Poll::Ready(Ok(()))
    }
}
