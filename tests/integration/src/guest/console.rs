//! A guest's serial console, over the VMM's standard streams or a [`Client`](crate::Client). The guest's init
//! executes one command per line; `xtask/src/init/guest.sh` describes the protocol.

use std::io::{Read, Write};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Number of times that a command is repeated whose reply was garbled.
const ATTEMPTS: usize = 3;

/// Interval between key presses that wake a sleeping guest.
const KEYSTROKE_EVERY: Duration = Duration::from_secs(1);

/// Output of a command in the guest, and its exit status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// The exit status.
    pub status: i32,
    /// Standard output and standard error, interleaved.
    pub text: String,
}

/// Reason why the expected output did not arrive.
#[derive(Debug)]
pub(crate) enum Silence {
    /// The limit passed.
    TimedOut(Duration),
    /// The VMM ended.
    Closed,
    /// The guest's kernel panicked.
    Panicked,
    /// Every reply was garbled.
    Garbled,
}

/// Both directions of the console.
pub(crate) struct Console {
    input: Box<dyn Write + Send>,
    received: Arc<Received>,
    /// Number of bytes of the received data that have been consumed.
    position: usize,
    next_command: u32,
}

#[derive(Default)]
struct Received {
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Default)]
struct State {
    bytes: Vec<u8>,
    closed: bool,
}

/// A complete reply, and its end.
struct Reply {
    output: Option<Output>,
    end: usize,
}

impl Console {
    pub(crate) fn new(input: impl Write + Send + 'static, mut output: impl Read + Send + 'static) -> Console {
        let received = Arc::new(Received::default());
        let sink = Arc::clone(&received);
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = output.read(&mut buffer) {
                sink.state.lock().bytes.extend_from_slice(&buffer[..length]);
                sink.more.notify_all();
            }
            sink.state.lock().closed = true;
            sink.more.notify_all();
        });
        Console { input: Box::new(input), received, position: 0, next_command: 1 }
    }

    /// Waits for init's ready mark. Returns the guest's uptime in seconds.
    pub(crate) fn wait_until_ready(&mut self, limit: Duration) -> Result<f64, Silence> {
        self.wait(limit, |bytes| {
            let (line, end) = line_after(bytes, b"@@ready ")?;
            Some((String::from_utf8_lossy(line).trim().parse().unwrap_or(0.0), end))
        })
    }

    /// Runs one command in the guest's shell.
    pub(crate) fn run(&mut self, command: &str, limit: Duration) -> Result<Output, Silence> {
        assert!(!command.contains('\n'), "a command is one line");
        let deadline = Instant::now() + limit;
        let number = self.next_command;
        self.next_command += 1;
        let mut request = format!("{number} {command}\n");
        for _ in 0..ATTEMPTS {
            // The VMM may have ended; the wait below detects that.
            let _ = self.input.write_all(request.as_bytes()).and_then(|()| self.input.flush());
            let left = deadline.saturating_duration_since(Instant::now());
            if let Some(output) =
                self.wait(left, |bytes| reply(bytes, number).map(|reply| (reply.output, reply.end)))?
            {
                return Ok(output);
            }
            request = "again\n".into();
        }
        Err(Silence::Garbled)
    }

    /// Runs one command that suspends the guest until a key is pressed: presses enter until the reply arrives. Init
    /// answers these empty lines as well, after that reply.
    pub(crate) fn run_while_typing(&mut self, command: &str, limit: Duration) -> Result<Output, Silence> {
        let deadline = Instant::now() + limit;
        let number = self.next_command;
        self.next_command += 1;
        self.send(&format!("{number} {command}\n"));
        loop {
            match self.wait(KEYSTROKE_EVERY, |bytes| reply(bytes, number).map(|reply| (reply.output, reply.end))) {
                Err(Silence::TimedOut(_)) if Instant::now() < deadline => self.send("\n"),
                Err(Silence::TimedOut(_)) => return Err(Silence::TimedOut(limit)),
                reply => return reply?.ok_or(Silence::Garbled),
            }
        }
    }

    /// Sends one command, and returns its number: the reply may come over another console.
    pub(crate) fn start(&mut self, command: &str) -> u32 {
        let number = self.next_command;
        self.next_command += 1;
        self.send(&format!("{number} {command}\n"));
        number
    }

    /// Waits for the reply to command `number`, which another console may have sent.
    pub(crate) fn finish(&mut self, number: u32, limit: Duration) -> Result<Output, Silence> {
        self.next_command = self.next_command.max(number + 1);
        let reply = self.wait(limit, |bytes| reply(bytes, number).map(|reply| (reply.output, reply.end)))?;
        reply.ok_or(Silence::Garbled)
    }

    /// Waits until the guest's kernel reports a panic.
    pub(crate) fn wait_for_panic(&mut self, limit: Duration) -> Result<(), Silence> {
        match self.wait(limit, |_| None::<((), usize)>) {
            Ok(()) | Err(Silence::Panicked) => Ok(()),
            Err(silence) => Err(silence),
        }
    }

    /// Waits until `text` was received.
    pub(crate) fn wait_for_text(&mut self, text: &str, limit: Duration) -> Result<(), Silence> {
        self.wait(limit, |bytes| position(bytes, text.as_bytes()).map(|start| ((), start + text.len())))
    }

    /// Everything received so far.
    pub(crate) fn transcript(&self) -> String {
        String::from_utf8_lossy(&self.received.state.lock().bytes).into_owned()
    }

    /// Sends `text` as if it were typed.
    pub(crate) fn send(&mut self, text: &str) {
        let _ = self.input.write_all(text.as_bytes()).and_then(|()| self.input.flush());
    }

    /// Waits until `find` succeeds on the unconsumed data, and consumes up to the end that it returns.
    fn wait<T>(&mut self, limit: Duration, find: impl Fn(&[u8]) -> Option<(T, usize)>) -> Result<T, Silence> {
        let deadline = Instant::now() + limit;
        let mut state = self.received.state.lock();
        loop {
            let unread = &state.bytes[self.position..];
            if let Some((found, end)) = find(unread) {
                self.position += end;
                return Ok(found);
            }
            if position(unread, b"Kernel panic").is_some() {
                return Err(Silence::Panicked);
            }
            if state.closed {
                return Err(Silence::Closed);
            }
            if self.received.more.wait_until(&mut state, deadline).timed_out() {
                return Err(Silence::TimedOut(limit));
            }
        }
    }
}

/// Finds the reply to command `number`. A reply without output was garbled by a kernel message.
fn reply(bytes: &[u8], number: u32) -> Option<Reply> {
    let (status, end) = line_after(bytes, format!("@@end {number} ").as_bytes())?;
    let status = String::from_utf8_lossy(status).trim().parse();
    let whole = || {
        let (length, start) = line_after(&bytes[..end], format!("@@begin {number} ").as_bytes())?;
        let length: usize = String::from_utf8_lossy(length).trim().parse().ok()?;
        let text = bytes.get(start..start + length)?;
        let rest = &bytes[start + length..end];
        let exact = rest.starts_with(format!("@@end {number} ").as_bytes());
        exact.then(|| String::from_utf8_lossy(text).into_owned())
    };
    let output = match (status, whole()) {
        (Ok(status), Some(text)) => Some(Output { status, text }),
        _ => None,
    };
    Some(Reply { output, end })
}

/// The rest of the first complete line that contains `mark`, and the start of the next line.
fn line_after<'a>(bytes: &'a [u8], mark: &[u8]) -> Option<(&'a [u8], usize)> {
    let start = position(bytes, mark)? + mark.len();
    let length = bytes[start..].iter().position(|&byte| byte == b'\n')?;
    Some((&bytes[start..start + length], start + length + 1))
}

fn position(bytes: &[u8], pattern: &[u8]) -> Option<usize> {
    bytes.windows(pattern.len()).position(|window| window == pattern)
}
