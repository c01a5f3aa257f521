//! Greetings and frames.

use super::bounds::{
    GREETING, HEADER, MAGIC, MAX_BODY, MAX_CONNECTIONS, MAX_DATA, MAX_LINE, MAX_PART, MAX_RANGES, OLDEST, RANGE, TABLE,
    VERSION,
};
use super::document::Part;
use super::error::{WireError, u16_at, u32_at, u64_at};

/// Purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Messages and documents of both sides.
    Control,
    /// Pages, with the connection's number from 0.
    Pages(u8),
}

/// Optional features. The two sides use those that both have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Features(pub u32);

impl Features {
    /// Memory and taps are passed as descriptors, and no page is copied.
    pub const LOCAL: Self = Self(1);
    /// Go carries the time since the guest was stopped.
    pub const DOWNTIME: Self = Self(2);
    /// All features that this version supports.
    pub const KNOWN: Self = Self(3);

    /// True if all features of `other` are set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These features without those of `other`.
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// First bytes of a connection, from the side that connects, and the reply on the first connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Greeting {
    /// Newest version that this side supports; in a reply, the selected version.
    pub version: u16,
    /// Oldest version that this side supports.
    pub oldest: u16,
    /// Purpose of the connection.
    pub role: Role,
    /// Number of connections for pages.
    pub connections: u8,
    /// Features of this side.
    pub features: Features,
    /// Random id of the migration, the same on all its connections.
    pub session: [u8; 16],
}

impl Greeting {
    /// Serializes the greeting.
    pub fn bytes(&self) -> [u8; GREETING] {
        let Self { version, oldest, role, connections, features, session } = self;
        let (kind, index) = match role {
            Role::Control => (0, 0),
            Role::Pages(index) => (1, *index),
        };
        let mut bytes = [0; GREETING];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&version.to_le_bytes());
        bytes[10..12].copy_from_slice(&oldest.to_le_bytes());
        bytes[12..15].copy_from_slice(&[kind, index, *connections]);
        bytes[16..20].copy_from_slice(&features.0.to_le_bytes());
        bytes[20..36].copy_from_slice(session);
        bytes
    }

    /// Parses a greeting. Ignores unknown features and the reserved bytes, which newer versions may use.
    ///
    /// # Errors
    ///
    /// Fails if the peer is not this program.
    pub fn read(bytes: &[u8; GREETING]) -> Result<Self, WireError> {
        if bytes[..8] != MAGIC {
            return Err(WireError::Foreign);
        }
        let (version, oldest) = (u16_at(bytes, 8)?, u16_at(bytes, 10)?);
        let role = match (bytes[12], bytes[13]) {
            (0, 0) => Role::Control,
            (1, index) if index < MAX_CONNECTIONS => Role::Pages(index),
            _ => return Err(WireError::Field("role")),
        };
        let connections = bytes[14];
        if connections > MAX_CONNECTIONS {
            return Err(WireError::Field("number of connections"));
        }
        if oldest > version {
            return Err(WireError::Field("version"));
        }
        let features = Features(u32_at(bytes, 16)? & Features::KNOWN.0);
        let mut session = [0; 16];
        session.copy_from_slice(&bytes[20..36]);
        Ok(Self { version, oldest, role, connections, features, session })
    }

    /// Returns the newest version that both sides support.
    ///
    /// # Errors
    ///
    /// Fails if there is none.
    pub fn common_version(&self) -> Result<u16, WireError> {
        let version = self.version.min(VERSION);
        if version < self.oldest.max(OLDEST) {
            return Err(WireError::Version { oldest: self.oldest, version: self.version });
        }
        Ok(version)
    }
}

/// Kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Kind {
    /// Part of the guest's description, from the source, for creating the target's VM.
    Offer = 1,
    /// The target has created its VM and opened all backends: pages may follow.
    Prepared = 2,
    /// Pages, from the source.
    Pages = 3,
    /// End of a pass on this connection.
    Flush = 4,
    /// Part of the machine state, from the source, whose guest is paused.
    State = 5,
    /// The target has the whole state, and can run the guest.
    Ready = 6,
    /// The target owns the guest. Sent at most once.
    Go = 7,
    /// The target runs the guest.
    Running = 8,
    /// The sender has failed, with a reason of one line.
    Failed = 9,
    /// A user has cancelled the migration.
    Cancel = 10,
    /// The sender is alive.
    Keepalive = 11,
}

impl Kind {
    pub(super) const ALL: [Self; 11] = [
        Self::Offer,
        Self::Prepared,
        Self::Pages,
        Self::Flush,
        Self::State,
        Self::Ready,
        Self::Go,
        Self::Running,
        Self::Failed,
        Self::Cancel,
        Self::Keepalive,
    ];

    /// Limit on the body, in bytes.
    pub const fn most(self) -> usize {
        match self {
            Self::Offer | Self::State => MAX_BODY,
            Self::Pages => TABLE + MAX_RANGES * RANGE + MAX_DATA,
            Self::Flush => 4,
            Self::Failed => MAX_LINE,
            Self::Go | Self::Running => 8,
            Self::Prepared | Self::Ready | Self::Cancel | Self::Keepalive => 0,
        }
    }
}

/// Header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Kind of the body.
    pub kind: Kind,
    /// Length of the body in bytes, within the limit of its kind.
    pub len: u32,
}

impl Header {
    /// Serializes the header.
    pub fn bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..2].copy_from_slice(&(self.kind as u16).to_le_bytes());
        bytes[4..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// Parses a header.
    ///
    /// # Errors
    ///
    /// Fails if the kind is unknown, or the length exceeds its limit.
    pub fn read(bytes: [u8; HEADER]) -> Result<Self, WireError> {
        let (kind, zero, len) = (u16_at(&bytes, 0)?, u16_at(&bytes, 2)?, u32_at(&bytes, 4)?);
        let kind = Kind::ALL.into_iter().find(|known| *known as u16 == kind).ok_or(WireError::Kind(kind))?;
        if zero != 0 {
            return Err(WireError::Field("header"));
        }
        let most = kind.most();
        if len as usize > most {
            return Err(WireError::Long { len, most });
        }
        Ok(Self { kind, len })
    }
}

/// Any frame without pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// See [`Kind::Offer`].
    Offer(Part),
    /// See [`Kind::Prepared`].
    Prepared,
    /// See [`Kind::Flush`]: number of the pass, from 0.
    Flush(u32),
    /// See [`Kind::State`].
    State(Part),
    /// See [`Kind::Ready`].
    Ready,
    /// See [`Kind::Go`]: time since the guest was stopped, in microseconds, if both sides have
    /// [`Features::DOWNTIME`].
    Go(Option<u64>),
    /// See [`Kind::Running`]: time from Go until the vCPUs ran, in microseconds.
    Running(u64),
    /// See [`Kind::Failed`].
    Failed(String),
    /// See [`Kind::Cancel`].
    Cancel,
    /// See [`Kind::Keepalive`].
    Keepalive,
}

impl Frame {
    /// Kind of the frame.
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Offer(_) => Kind::Offer,
            Self::Prepared => Kind::Prepared,
            Self::Flush(_) => Kind::Flush,
            Self::State(_) => Kind::State,
            Self::Ready => Kind::Ready,
            Self::Go(_) => Kind::Go,
            Self::Running(_) => Kind::Running,
            Self::Failed(_) => Kind::Failed,
            Self::Cancel => Kind::Cancel,
            Self::Keepalive => Kind::Keepalive,
        }
    }

    /// Serializes the frame with its header. A line that is too long is cut.
    pub fn bytes(&self) -> Vec<u8> {
        let mut body = Vec::new();
        match self {
            Self::Offer(part) | Self::State(part) => {
                body.push(part.is_last.into());
                body.extend(part.bytes.iter().take(MAX_PART));
            }
            Self::Flush(pass) => body.extend(pass.to_le_bytes()),
            Self::Go(Some(took)) | Self::Running(took) => body.extend(took.to_le_bytes()),
            Self::Failed(line) => body.extend(shortened(line).as_bytes()),
            Self::Prepared | Self::Ready | Self::Go(None) | Self::Cancel | Self::Keepalive => {}
        }
        let header = Header { kind: self.kind(), len: body.len() as u32 };
        let mut bytes = header.bytes().to_vec();
        bytes.append(&mut body);
        bytes
    }

    /// Parses the body of a frame of `kind`.
    ///
    /// # Errors
    ///
    /// Fails if the body does not fit the kind, or the kind is [`Kind::Pages`].
    pub fn read(kind: Kind, body: &[u8]) -> Result<Self, WireError> {
        let part = || match body {
            [is_last @ (0 | 1), bytes @ ..] if bytes.len() <= MAX_PART => {
                Ok(Part { is_last: *is_last == 1, bytes: bytes.to_vec() })
            }
            [] => Err(WireError::Short),
            _ => Err(WireError::Field("part")),
        };
        let empty = |frame| if body.is_empty() { Ok(frame) } else { Err(WireError::Field("length")) };
        match kind {
            Kind::Offer => Ok(Self::Offer(part()?)),
            Kind::State => Ok(Self::State(part()?)),
            Kind::Flush => Ok(Self::Flush(u32_at(body, 0)?)),
            Kind::Running => Ok(Self::Running(u64_at(body, 0)?)),
            Kind::Failed => Ok(Self::Failed(line_of(body))),
            Kind::Prepared => empty(Self::Prepared),
            Kind::Ready => empty(Self::Ready),
            Kind::Go if body.is_empty() => Ok(Self::Go(None)),
            Kind::Go => Ok(Self::Go(Some(u64_at(body, 0)?))),
            Kind::Cancel => empty(Self::Cancel),
            Kind::Keepalive => empty(Self::Keepalive),
            Kind::Pages => Err(WireError::Field("connection")),
        }
    }
}

fn shortened(line: &str) -> &str {
    let mut end = line.len().min(MAX_LINE);
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    &line[..end]
}

/// Converts a peer's text to one printable line.
fn line_of(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(MAX_LINE)]);
    let line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    shortened(&line).to_string()
}
