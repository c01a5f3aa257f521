//! The thread of a target that waits for a source and all its connections.

use std::io;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustls::ServerConfig;
use virtio_devices::{Cancel, NewThread, Thread};

use super::incoming::Incoming;
use super::link::STACK;
use super::transport::{Address, Listener, Stream, Until};
use super::wire::{Frame, Greeting, Role};
use crate::threads::{self, ThreadKind};

/// How long whoever connects may take to prove who it is, and to greet.
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
        let until = Until::after(PATIENCE, cancel);
        let accepted = match tls {
            Some(tls) => stream.accept(tls, &until),
            None => Ok(stream),
        };
        let stream = match accepted {
            Ok(stream) => stream,
            Err(_) if cancel.is_cancelled() => return Ok(()),
            Err(error) => {
                log::warn!("{REFUSED}: {error}");
                continue;
            }
        };
        let greeting = match greeting_of(&stream, until) {
            Ok(greeting) => greeting,
            Err(_) if cancel.is_cancelled() => return Ok(()),
            Err(why) => {
                log::warn!("{REFUSED}: {why}");
                refuse(&stream, &why);
                continue;
            }
        };
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

/// The greeting of whoever has connected, or why it is no source of this program. It may take too long.
fn greeting_of(stream: &Stream, until: Until) -> Result<Greeting, String> {
    let greeting = Incoming::new(stream.reads_until(until)).greeting().map_err(|error| error.to_string())?;
    greeting.common_version().map_err(|error| error.to_string())?;
    if greeting.connections == 0 {
        return Err("a source without connections for pages".to_string());
    }
    Ok(greeting)
}

fn refuse(stream: &Stream, why: &str) {
    // Whoever it is finds out in any case.
    let _ = io::Write::write_all(&mut &*stream, &Frame::Failed(why.to_string()).bytes());
    stream.close();
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::thread;
    use std::time::Instant;

    use super::*;

    /// A target that listens at `path`.
    fn listening(path: &Path) -> Listening {
        let listener = Listener::bind(&Address::Unix(path.into())).unwrap();
        Listening::begin(listener, None, Cancel::new().unwrap(), |_| {}).unwrap()
    }

    /// It would have 5 s for each byte.
    #[test]
    fn whoever_greets_byte_by_byte_is_refused_in_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _listening = listening(&path);
        let mut stranger = UnixStream::connect(&path).unwrap();
        let began = Instant::now();
        // The last byte of the greeting would come after 80 s.
        let sent = (0..40).take_while(|_| {
            thread::sleep(Duration::from_secs(2));
            stranger.write_all(b"C").is_ok()
        });
        assert!(sent.count() < 4);
        assert!(began.elapsed() < PATIENCE * 2, "{:?}", began.elapsed());
        let mut said = Vec::new();
        let _ = stranger.read_to_end(&mut said);
        assert!(String::from_utf8_lossy(&said).contains("took too long"), "{said:?}");
    }

    #[test]
    fn a_stranger_that_says_nothing_is_not_waited_for_when_the_target_ends() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listening = listening(&path);
        let _stranger = UnixStream::connect(&path).unwrap();
        thread::sleep(Duration::from_millis(200));
        let began = Instant::now();
        drop(listening);
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    }
}
