//! The API server's threads.
//!
//! The thread `http-server` accepts connections and waits for all idle ones in one epoll. When a client has sent bytes,
//! its connection goes to a worker, `http-N`, which advances it as far as possible, calls the [`Handler`], and hands it
//! back. So an idle or slow client uses a descriptor but no thread. A slow action uses a thread, and the next client
//! gets another one.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::io::{Errno, ioctl_fionread, read, write};
use virtio_devices::{NewThread, Thread};

use crate::api::Handler;
use crate::api::connection::{Connection, PATIENCE, Wait};
use crate::api::exchange::MOST_FDS;
use crate::api::service::Service;
use crate::landlock;
use crate::threads::{self, ThreadKind};

/// The most connections. A further connection replaces one that waits for its client: preferably one without an
/// answered request, otherwise the one that has been idle for longest.
pub const MOST_CONNECTIONS: usize = 128;
/// A thread's stack in bytes. Requests are parsed and answered on it.
const STACK: usize = 2 << 20;
/// The most worker threads.
pub const MOST_WORKERS: usize = 64;
/// The most connections of readers.
pub const MOST_READERS: usize = 32;
/// Time limit for the end of the threads that serve readers.
const READERS_END: Duration = Duration::from_secs(2);
/// Time that a worker waits for work before it ends. The last one stays.
const IDLE: Duration = Duration::from_secs(5);
/// The pause before accepting again if there is no room, or no descriptor left.
const PAUSE: Duration = Duration::from_millis(100);
/// Time that a new client has to send its first request before another connection may replace it.
const GRACE: Duration = Duration::from_millis(100);
/// Time that a client may take to receive its answer when the server ends.
const FAREWELL: Duration = Duration::from_secs(1);

/// The epoll tokens below those of connections.
const LISTENER: u64 = 0;
const WAKE: u64 = 1;
const FIRST_CONNECTION: u64 = 2;

/// The clients of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clients {
    /// Clients that may do everything.
    All,
    /// Readers, which change nothing. One worker serves them, so that only one of their requests at a time waits for
    /// the control thread, and delays the requests of other clients.
    Readers,
}

impl Clients {
    /// The most connections.
    const fn most_connections(self) -> usize {
        match self {
            Self::All => MOST_CONNECTIONS,
            Self::Readers => MOST_READERS,
        }
    }

    /// The most worker threads.
    const fn most_workers(self) -> usize {
        match self {
            Self::All => MOST_WORKERS,
            Self::Readers => 1,
        }
    }

    /// The most files that they make this process open: connections, a further one before it replaces another, and
    /// descriptors that they pass, with one too many in the last message.
    pub const fn most_files(self) -> u64 {
        (self.most_connections() + 1 + MOST_FDS + 1) as u64
    }
}

/// A running API server. Dropping it waits until started actions are applied and answered. A [`Handler`] must not drop
/// it: that would deadlock.
pub struct Server {
    shared: Arc<Shared>,
    poller: Option<Thread>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").finish_non_exhaustive()
    }
}

impl Server {
    /// Serves the `clients` of `listener`. `handler` applies their actions.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptors or threads left.
    pub fn start(listener: UnixListener, clients: Clients, handler: Arc<dyn Handler>) -> io::Result<Self> {
        Self::with_patience(listener, clients, handler, PATIENCE)
    }

    /// As [`Self::start`], with `patience` as the time limit for a client to send a request and to receive its answer.
    ///
    /// # Errors
    ///
    /// Fails if the host has no descriptors or threads left.
    pub fn with_patience(
        listener: UnixListener,
        clients: Clients,
        handler: Arc<dyn Handler>,
        patience: Duration,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener, epoll::EventData::new_u64(LISTENER), ONCE_READABLE)?;
        epoll::add(&epoll, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let shared = Arc::new(Shared {
            service: Arc::new(Service {
                handler,
                is_read_only: clients == Clients::Readers,
                budget: Arc::default(),
                patience,
            }),
            clients,
            epoll,
            wake,
            state: Mutex::default(),
            work: Condvar::new(),
        });
        // Created first, so that dropping it ends the threads already started if a later one cannot be.
        let mut server = Self { shared: shared.clone(), poller: None };
        shared.start_worker(&mut shared.state.lock())?;
        let poller = Poller { shared, listener, accept_at: None };
        server.poller = Some(start_thread(ThreadKind::HttpServer, String::new(), move || poller.run())?);
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.state.lock().ended = true;
        self.shared.work.notify_all();
        self.shared.wake();
        let workers = mem::take(&mut self.shared.state.lock().workers);
        let end = Instant::now() + READERS_END;
        for thread in self.poller.take().into_iter().chain(workers) {
            // A reader may have sent a file whose closing takes as long as the reader likes.
            if self.shared.clients == Clients::Readers {
                while !thread.is_finished() && Instant::now() < end {
                    std::thread::sleep(Duration::from_millis(1));
                }
                if !thread.is_finished() {
                    continue;
                }
            }
            if thread.join().is_err() {
                log::error!("an API thread panicked; please report this");
            }
        }
    }
}

/// Starts one of the threads, none of which opens files.
fn start_thread(kind: ThreadKind, number: String, run: impl FnOnce() + Send + 'static) -> io::Result<Thread> {
    let thread = NewThread::new(format!("{}{number}", kind.name()), STACK, run);
    threads::start(kind, thread.after(landlock::isolation(None)))
}

const ONCE_READABLE: epoll::EventFlags = epoll::EventFlags::IN.union(epoll::EventFlags::ONESHOT);
const ONCE_WRITABLE: epoll::EventFlags = epoll::EventFlags::OUT.union(epoll::EventFlags::ONESHOT);

/// State that the threads share.
struct Shared {
    service: Arc<Service>,
    clients: Clients,
    epoll: OwnedFd,
    /// Signalled when there is a new deadline, and at the end.
    wake: OwnedFd,
    state: Mutex<State>,
    /// Signalled when there is work, and at the end.
    work: Condvar,
}

#[derive(Default)]
struct State {
    ended: bool,
    /// Connections that wait for their clients, by token.
    waiting: HashMap<u64, (Connection, Wait)>,
    /// True if a client waits to be accepted until there is room.
    is_full: bool,
    /// Connections that can be advanced.
    ready: VecDeque<(u64, Connection)>,
    /// Number of connections that workers hold.
    advancing: usize,
    workers: Vec<Thread>,
    running_workers: usize,
    idle_workers: usize,
    last_token: u64,
}

/// Result of an attempt to close a connection in favour of another.
enum Eviction {
    /// A connection was closed.
    Done,
    /// None may be closed yet; one may at this time.
    At(Instant),
}

impl State {
    fn connections(&self) -> usize {
        self.waiting.len() + self.ready.len() + self.advancing
    }

    /// Closes the waiting connection that matters least.
    ///
    /// Connections without an answered request are closed first, but not before they had the time to send one:
    /// otherwise clients that connect at the same time would replace each other. A connection whose client has just
    /// sent bytes stays.
    fn evict(&mut self) -> Eviction {
        let now = Instant::now();
        let (mut least, mut next) = (None, None);
        for (token, (connection, wait)) in &self.waiting {
            let (has_answered, chance) = (connection.has_answered(), connection.opened + GRACE);
            if !has_answered && chance > now {
                next = Some(next.map_or(chance, |next: Instant| next.min(chance)));
            } else if ioctl_fionread(connection).is_ok_and(|bytes| bytes == 0) {
                let rank = (has_answered, *wait != Wait::Request, connection.used, *token);
                least = Some(least.map_or(rank, |least| rank.min(least)));
            }
        }
        match (least, next) {
            (Some((true, ..)) | None, Some(next)) => Eviction::At(next),
            (Some((.., token)), _) => {
                self.waiting.remove(&token);
                Eviction::Done
            }
            (None, None) => Eviction::At(now + PAUSE),
        }
    }

    /// The earliest deadline of all waiting connections.
    fn deadline(&self) -> Option<Instant> {
        self.waiting.values().filter_map(|(_, wait)| wait.deadline()).min()
    }
}

impl Wait {
    const fn deadline(self) -> Option<Instant> {
        match self {
            Self::Request => None,
            Self::Rest(deadline) | Self::Room(deadline) => Some(deadline),
        }
    }

    const fn events(self) -> epoll::EventFlags {
        match self {
            Self::Request | Self::Rest(_) => ONCE_READABLE,
            Self::Room(_) => ONCE_WRITABLE,
        }
    }
}

impl Shared {
    fn wake(&self) {
        // If the counter is full, the thread is already woken.
        let _ = write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Hands a connection that can be advanced to a worker.
    fn dispatch(self: &Arc<Self>, state: &mut State, token: u64, connection: Connection) {
        state.ready.push_back((token, connection));
        if state.idle_workers < state.ready.len()
            && state.running_workers < self.clients.most_workers()
            && let Err(error) = self.start_worker(state)
        {
            log::debug!("cannot start another thread for the API: {error}");
        }
        self.work.notify_one();
    }

    fn start_worker(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        state.workers.retain(|worker| !worker.is_finished());
        let shared = self.clone();
        let number = state.running_workers.to_string();
        state.workers.push(start_thread(ThreadKind::Http, number, move || shared.work())?);
        state.running_workers += 1;
        Ok(())
    }

    /// The worker threads' loop.
    fn work(&self) {
        let mut state = self.state.lock();
        while !state.ended {
            if let Some((token, mut connection)) = state.ready.pop_front() {
                state.advancing += 1;
                drop(state);
                let wait = connection.advance();
                state = self.state.lock();
                state.advancing -= 1;
                match wait {
                    Some(wait) if !state.ended => self.wait(&mut state, token, connection, wait),
                    Some(Wait::Room(_)) => {
                        drop(state);
                        farewell(connection);
                        state = self.state.lock();
                    }
                    _ => {}
                }
                if state.is_full {
                    self.wake();
                }
                continue;
            }
            state.idle_workers += 1;
            let is_bored = self.work.wait_for(&mut state, IDLE).timed_out();
            state.idle_workers -= 1;
            if is_bored && state.ready.is_empty() && state.running_workers > 1 {
                break;
            }
        }
        state.running_workers -= 1;
    }

    /// Makes a connection wait for its client.
    fn wait(&self, state: &mut State, token: u64, connection: Connection, wait: Wait) {
        let data = epoll::EventData::new_u64(token);
        let armed = match epoll::modify(&self.epoll, &connection, data, wait.events()) {
            Err(Errno::NOENT) => epoll::add(&self.epoll, &connection, data, wait.events()),
            armed => armed,
        };
        if let Err(error) = armed {
            log::debug!("dropping a client of the API: {error}");
            return;
        }
        state.waiting.insert(token, (connection, wait));
        if wait.deadline().is_some() {
            self.wake();
        }
    }
}

/// Writes the rest of the last answer.
fn farewell(mut connection: Connection) {
    let deadline = Instant::now() + FAREWELL;
    while let Some(left) = deadline.checked_duration_since(Instant::now())
        && wait_for_room(&connection, left)
        && matches!(connection.advance(), Some(Wait::Room(_)))
    {}
}

fn wait_for_room(connection: &Connection, patience: Duration) -> bool {
    let timeout = Timespec::try_from(patience).ok();
    let fd = connection.as_fd();
    poll(&mut [PollFd::new(&fd, PollFlags::OUT)], timeout.as_ref()).is_ok_and(|ready| ready > 0)
}

/// The thread that waits for clients.
struct Poller {
    shared: Arc<Shared>,
    listener: UnixListener,
    /// Time of the next accept, if there was no room or no descriptor.
    accept_at: Option<Instant>,
}

impl Poller {
    fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        loop {
            let timeout = self.timeout();
            events.clear();
            match epoll::wait(&self.shared.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    log::error!("the API's thread cannot wait for clients: {error}");
                    return;
                }
            }
            let shared = self.shared.clone();
            let mut state = shared.state.lock();
            if state.ended {
                // No waiting connection has an action in progress.
                state.waiting.clear();
                state.ready.clear();
                return;
            }
            for event in &events {
                match event.data.u64() {
                    LISTENER => self.accept(&mut state),
                    WAKE => _ = read(&shared.wake, &mut [0; 8]),
                    token => {
                        if let Some((connection, _)) = state.waiting.remove(&token) {
                            shared.dispatch(&mut state, token, connection);
                        }
                    }
                }
            }
            let now = Instant::now();
            state.waiting.retain(|_, (_, wait)| wait.deadline().is_none_or(|deadline| deadline > now));
            if state.is_full || self.accept_at.is_some_and(|at| at <= now) {
                self.accept(&mut state);
            }
        }
    }

    /// The time until the next deadline; `None` to wait for clients only.
    fn timeout(&self) -> Option<Timespec> {
        let deadline = self.shared.state.lock().deadline();
        let next = deadline.into_iter().chain(self.accept_at).min()?;
        let left = next.saturating_duration_since(Instant::now());
        // Rounded up, so that the wait does not end just before the deadline.
        Timespec::try_from(left + Duration::from_millis(1)).ok()
    }

    /// Accepts clients.
    fn accept(&mut self, state: &mut State) {
        self.accept_at = None;
        state.is_full = false;
        let mut is_out_of_files = false;
        loop {
            if (is_out_of_files || state.connections() >= self.shared.clients.most_connections())
                && let Err(at) = self.make_room(state)
            {
                break self.accept_at = at;
            }
            match self.listener.accept() {
                Ok((stream, _)) => match Connection::new(stream, &self.shared.service) {
                    Ok(connection) => {
                        is_out_of_files = false;
                        let token = state.last_token.max(FIRST_CONNECTION - 1) + 1;
                        state.last_token = token;
                        self.shared.wait(state, token, connection, Wait::Request);
                    }
                    Err(error) => log::debug!("dropping a client of the API: {error}"),
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break self.accept_at = self.listen(),
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {
                }
                // Too many open files in the process or the host: closing a connection may help.
                Err(error) => {
                    log::debug!("cannot accept a client of the API: {error}");
                    if mem::replace(&mut is_out_of_files, true) {
                        break self.accept_at = Some(Instant::now() + PAUSE);
                    }
                }
            }
        }
    }

    /// Closes a connection if a client waits to be accepted. Uses poll, not accept(2), to find out: without a
    /// descriptor left, accept(2) fails before it checks.
    ///
    /// # Errors
    ///
    /// Fails if no client waits, or no connection may be closed yet; then with the time to try again, unless the
    /// listener or a connection is ready earlier.
    fn make_room(&self, state: &mut State) -> Result<(), Option<Instant>> {
        let fd = self.listener.as_fd();
        if poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&Timespec::default())).is_ok_and(|ready| ready == 0) {
            return Err(self.listen());
        }
        match state.evict() {
            Eviction::Done => Ok(()),
            Eviction::At(time) => {
                state.is_full = true;
                Err(Some(time))
            }
        }
    }

    /// Waits for the next client; or, if that is impossible, until the returned time.
    fn listen(&self) -> Option<Instant> {
        let data = epoll::EventData::new_u64(LISTENER);
        let armed = epoll::modify(&self.shared.epoll, &self.listener, data, ONCE_READABLE);
        armed.is_err().then(|| Instant::now() + PAUSE)
    }
}
