//! The thread of a target that waits for a source and all its connections.

use std::io;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustls::ServerConfig;
use virtio_devices::{Cancel, NewThread, Thread};

use super::incoming::Incoming;
use super::link::STACK;
use super::transport::{Address, Listener, Stream};
use super::wire::{Frame, Greeting, Role};
use crate::threads::{self, ThreadKind};

/// How long whoever connects may take to greet.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is told of whoever is no source.
const REFUSED: &str = "a connection is refused, and a source still waited for";

/// Listens at `address`, which has no name that has to be looked up.
///
/// # Errors
///
/// The address is taken, or not this host's.
pub(crate) fn bind(address: Address) -> io::Result<Listener> {
    let (made, listener) = mpsc::sync_channel(1);
    // Who asks may make no such sockets.
    let run = move || _ = made.send(Listener::bind(&address));
    let thread = threads::start(ThreadKind::Migration, NewThread::new("migration-bind", STACK, run))?;
    // If it panicked, that has been reported, and nothing was sent.
    let _ = thread.join();
    listener.recv().map_err(io::Error::other)?
}

/// Who has connected.
pub(super) enum Connected {
    /// A source, to talk to.
    Control(Stream, Greeting),
    /// The same source, with a connection of this number for pages.
    Pages(u8, Stream),
    /// Nobody will any more.
    Failed(String),
}

/// The thread. Dropping this waits for its end, which the `cancel` that it was given brings.
pub(super) struct Listening(Option<Thread>, Cancel);

impl Listening {
    /// Begins to wait. It ends by itself when a source has all its connections.
    ///
    /// # Errors
    ///
    /// The host has no thread left.
    pub(super) fn begin(
        listener: Listener,
        tls: Option<Arc<ServerConfig>>,
        cancel: Cancel,
        tell: impl Fn(Connected) + Send + 'static,
    ) -> io::Result<Self> {
        let ends = cancel.clone();
        let run = move || {
            if let Err(error) = listen(&listener, tls.as_ref(), &ends, &tell) {
                tell(Connected::Failed(format!("no connection can be accepted: {error}")));
            }
        };
        let kind = ThreadKind::Migration;
        let thread = threads::start(kind, NewThread::new("migration-wait", STACK, run))?;
        Ok(Self(Some(thread), cancel))
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.1.cancel();
        if let Some(thread) = self.0.take() {
            // If it panicked, that has been reported.
            let _ = thread.join();
        }
    }
}

/// Waits for a source, and then for the connections that its greeting announces.
fn listen(
    listener: &Listener,
    tls: Option<&Arc<ServerConfig>>,
    cancel: &Cancel,
    tell: &impl Fn(Connected),
) -> io::Result<()> {
    let (mut first, mut missing): (Option<Greeting>, Vec<u8>) = (None, Vec::new());
    while first.is_none() || !missing.is_empty() {
        let Some(stream) = listener.accept(cancel)? else { return Ok(()) };
        let accepted = match tls {
            Some(tls) => stream.accept(tls),
            None => Ok(stream),
        };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(error) => {
                log::warn!("{REFUSED}: {error}");
                continue;
            }
        };
        let Some(greeting) = greeting_of(&stream) else { continue };
        match (&first, greeting.role) {
            (None, Role::Control) => {
                first = Some(greeting);
                missing = (0..greeting.connections).collect();
                tell(Connected::Control(stream, greeting));
            }
            (Some(first), Role::Pages(index)) if first.session == greeting.session && missing.contains(&index) => {
                missing.retain(|missing| *missing != index);
                tell(Connected::Pages(index, stream));
            }
            _ => refuse(&stream, "the target is busy with another source"),
        }
    }
    Ok(())
}

/// The greeting of whoever has connected; `None` if it is no source of this program.
fn greeting_of(stream: &Stream) -> Option<Greeting> {
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let greeting = Incoming::new(stream).greeting();
    let refused = match greeting {
        Ok(greeting) => match greeting.common_version() {
            Ok(_) if greeting.connections > 0 => {
                stream.set_read_timeout(None).ok()?;
                return Some(greeting);
            }
            Ok(_) => "a source without connections for pages".to_string(),
            Err(error) => error.to_string(),
        },
        Err(error) => error.to_string(),
    };
    log::warn!("{REFUSED}: {refused}");
    refuse(stream, &refused);
    None
}

fn refuse(stream: &Stream, why: &str) {
    // Whoever it is finds out in any case.
    let _ = io::Write::write_all(&mut &*stream, &Frame::Failed(why.to_string()).bytes());
    stream.close();
}
