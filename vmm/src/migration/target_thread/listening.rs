//! The target's thread that accepts a source and all its connections.
//!
//! Any peer may connect first. So handshakes run concurrently in a fixed number of slots, in one thread that never
//! blocks on one of them.

mod refusals;
mod slots;
mod stranger;

use std::io;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};
use rustls::ServerConfig;
use virtio_devices::{Cancel, NewThread, Thread};

use crate::migration::control_channel::STACK;
use crate::migration::deadline::CHECK_INTERVAL;
use crate::migration::transport::{Address, Listener, Stream};
use crate::migration::wire::{Greeting, Role};
use crate::threads::{self, ThreadKind};
use refusals::Refusals;
use slots::{SLOTS, Slots};
use stranger::Stranger;

/// Acceptor at `address`, which is a path or an IP address.
///
/// # Errors
///
/// Fails if the address is in use, or not of this host.
pub(crate) fn bind(address: Address) -> io::Result<Listener> {
    let (made, listener) = mpsc::sync_channel(1);
    // The calling thread may not be allowed to create sockets.
    let run = move || _ = made.send(Listener::bind(&address));
    let thread = threads::start(ThreadKind::Migration, NewThread::new("migration-bind", STACK, run))?;
    // A panic has already been reported; the queue is empty then.
    let _ = thread.join();
    listener.recv().map_err(io::Error::other)?
}

/// An accepted connection.
pub(super) enum Connected {
    /// Control connection of a source.
    Control(Stream, Greeting),
    /// Connection of that source for pages, with its number.
    Pages(u8, Stream),
    /// Listening has failed.
    Failed(String),
}

/// Handle to the listening thread. Dropping it cancels the thread and waits for its end.
pub(super) struct Listening(Option<Thread>, Cancel);

impl Listening {
    /// Starts the thread, which ends once a source has all its connections.
    ///
    /// # Errors
    ///
    /// Fails if the host cannot start a thread.
    pub(super) fn start(
        listener: Listener,
        tls: Option<Arc<ServerConfig>>,
        cancel: Cancel,
        notify: impl Fn(Connected) + Send + 'static,
    ) -> io::Result<Self> {
        let ends = cancel.clone();
        let run = move || {
            let refusals = Refusals::new(Instant::now(), |line| log::warn!("{line}"));
            let (listener, tls) = (&listener, tls.as_ref());
            let (slots, missing) = (Slots::default(), Vec::new());
            let acceptor = Acceptor { listener, tls, slots, refusals, first: None, missing };
            if let Err(error) = acceptor.listen(&ends, &notify) {
                notify(Connected::Failed(format!("no connection can be accepted: {error}")));
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
            // A panic has already been reported.
            let _ = thread.join();
        }
    }
}

/// State of the listening thread.
struct Acceptor<'a> {
    listener: &'a Listener,
    tls: Option<&'a Arc<ServerConfig>>,
    slots: Slots,
    refusals: Refusals,
    first: Option<Greeting>,
    /// Connections for pages that the source has not made yet.
    missing: Vec<u8>,
}

impl Acceptor<'_> {
    /// Accepts a source, and then the connections that its greeting announces.
    fn listen(mut self, cancel: &Cancel, notify: &impl Fn(Connected)) -> io::Result<()> {
        while (self.first.is_none() || !self.missing.is_empty()) && !cancel.is_cancelled() {
            let (is_called, is_ready) = self.wait()?;
            let now = Instant::now();
            self.refusals.update(now);
            let (greeted, refused) = self.slots.advance(&is_ready, now);
            for (stranger, why) in refused {
                self.refuse(stranger, &why, now);
            }
            for (stranger, greeting) in greeted {
                self.take(stranger, greeting, notify)?;
            }
            if is_called {
                self.accept(now)?;
            }
        }
        Ok(())
    }

    /// Waits for a short time. Returns true if a peer connects, and for each slot true if it is readable.
    fn wait(&self) -> io::Result<(bool, Vec<bool>)> {
        let accepts = self.slots.have_room(Instant::now());
        let strangers = self.slots.all().iter().map(|stranger| PollFd::new(stranger.stream(), stranger.awaits()));
        let listener = accepts.then(|| PollFd::new(self.listener, PollFlags::IN));
        let mut fds: Vec<_> = strangers.chain(listener).collect();
        match rustix::event::poll(&mut fds, Some(&CHECK_INTERVAL)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut ready: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let is_called = accepts && ready.pop() == Some(true);
        Ok((is_called, ready))
    }

    /// Accepts at most as many connections as there are slots, so that those in slots are read in between.
    fn accept(&mut self, now: Instant) -> io::Result<()> {
        for _ in 0..SLOTS {
            if !self.slots.have_room(now) {
                break;
            }
            let Some(stream) = self.listener.accept()? else { break };
            let stranger = Stranger::new(stream, self.tls, now)?;
            if let Some((gone, why)) = self.slots.add(stranger, now) {
                self.refuse(gone, &why, now);
            }
        }
        Ok(())
    }

    fn refuse(&mut self, stranger: Stranger, why: &str, now: Instant) {
        self.refusals.add(why, now);
        stranger.refuse(why);
    }

    /// Accepts a peer that has sent its greeting: the first source, or a connection of that source.
    fn take(&mut self, stranger: Stranger, greeting: Greeting, notify: &impl Fn(Connected)) -> io::Result<()> {
        match (&self.first, greeting.role) {
            (None, Role::Control) => {
                self.first = Some(greeting);
                self.missing = (0..greeting.connections).collect();
                notify(Connected::Control(stranger.into_stream()?, greeting));
            }
            (Some(first), Role::Pages(index)) if first.session == greeting.session && self.missing.contains(&index) => {
                self.missing.retain(|missing| *missing != index);
                notify(Connected::Pages(index, stranger.into_stream()?));
            }
            _ => stranger.refuse("the target is busy with another source"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::path::Path;
    use std::thread;
    use std::time::Duration;

    use super::stranger::PATIENCE;
    use super::*;

    /// A target that acceptor at `path`.
    fn listening(path: &Path) -> Listening {
        let listener = Listener::bind(&Address::Unix(path.into())).unwrap();
        Listening::start(listener, None, Cancel::new().unwrap(), |_| {}).unwrap()
    }

    /// [`PATIENCE`] bounds the whole greeting, not each byte.
    #[test]
    fn a_greeting_byte_by_byte_is_refused_in_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let _listening = listening(&path);
        let mut stranger = UnixStream::connect(&path).unwrap();
        let began = Instant::now();
        // The whole greeting would take 80 s.
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

    /// Handled one after the other, silent peers would delay the source.
    #[test]
    fn a_source_behind_a_hundred_silent_strangers_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&Address::Unix(path.clone())).unwrap();
        let (sender, connected) = mpsc::channel();
        let notify = move |connected| _ = sender.send(matches!(connected, Connected::Control(..)));
        let _listening = Listening::start(listener, None, Cancel::new().unwrap(), notify).unwrap();
        let _strangers: Vec<_> = (0..100).map(|_| UnixStream::connect(&path).unwrap()).collect();
        let greeting = Greeting {
            version: crate::migration::wire::VERSION,
            oldest: crate::migration::wire::OLDEST,
            role: Role::Control,
            connections: 1,
            features: crate::migration::wire::Features::default(),
            session: [3; 16],
        };
        let mut source = UnixStream::connect(&path).unwrap();
        source.write_all(&greeting.bytes()).unwrap();
        assert_eq!(connected.recv_timeout(Duration::from_secs(60)), Ok(true));
    }

    #[test]
    fn silent_peer_does_not_delay_shutdown_of_the_target() {
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
