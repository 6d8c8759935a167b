package rtrs

import (
	"fmt"
	"slices"
)

// PathState is where a client's path is in its life. The diagram is in the
// package documentation.
type PathState uint8

const (
	// PathConnecting: connections are being made, or INFO is exchanged.
	PathConnecting PathState = iota
	// PathConnected: requests may use the path.
	PathConnected
	// PathConnectingErr: the attempt failed, its remains are removed.
	PathConnectingErr
	// PathReconnecting: the path was lost or could not be made, its
	// connections are drained, the next attempt waits for its time.
	PathReconnecting
	// PathClosing: closed by the user or for good, connections are drained.
	PathClosing
	// PathClosed: nothing is left of the connections; a manual reconnect
	// starts again.
	PathClosed
	// PathDead: removed from the session.
	PathDead
)

var pathStateNames = [...]string{
	PathConnecting:    "connecting",
	PathConnected:     "connected",
	PathConnectingErr: "connecting_err",
	PathReconnecting:  "reconnecting",
	PathClosing:       "closing",
	PathClosed:        "closed",
	PathDead:          "dead",
}

func (s PathState) String() string {
	if int(s) >= len(pathStateNames) {
		return fmt.Sprintf("state(%d)", uint8(s))
	}
	return pathStateNames[s]
}

// pathMoves lists the states that may follow a state.
var pathMoves = [...][]PathState{
	PathConnecting:    {PathConnected, PathConnectingErr, PathClosing},
	PathConnected:     {PathReconnecting, PathClosing},
	PathConnectingErr: {PathReconnecting, PathClosing},
	PathReconnecting:  {PathConnecting, PathClosing},
	PathClosing:       {PathClosed},
	PathClosed:        {PathReconnecting, PathDead},
	PathDead:          {},
}

func (s PathState) mayBecome(next PathState) bool {
	return slices.Contains(pathMoves[s], next)
}
