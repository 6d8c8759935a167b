package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
)

// protection is what protects the devices of a daemon from others than their users. The
// next process of the daemon must not have less.
type protection struct {
	Rules   int      `json:"rules"`         // number of access rules; -1: no file has the key
	TLS     string   `json:"tls"`           // off, allow or require
	Auth    []string `json:"auth"`          // the same, for each listener
	NBDTLS  string   `json:"nbd-tls"`       // of a client's NBD front end
	Trusted []string `json:"trusted"`       // listeners that may be without TLS
	Confine string   `json:"confine"`       // off, try or strict
	Exports []string `json:"block-devices"` // of a server
}

// envProtection has the protection of the process that hands over, as JSON.
const envProtection = "RNBD_HANDOVER_PROTECTION"

// Values of a setting, from the weakest on. The indices are those of rtrs.AuthMode, too.
var (
	modesByStrength   = []string{tlsOff, tlsAllow, tlsRequire}
	confineByStrength = []string{string(confine.Off), string(confine.Try), string(confine.Strict)}
)

func ruleCount[R any](rules []R) int {
	if rules == nil {
		return -1
	}
	return len(rules)
}

// protection of a server. The options have been checked.
func (o *serverOptions) protection() protection {
	p := protection{Rules: ruleCount(o.Access), TLS: o.TLS, Confine: o.Confine, Exports: o.BlockDevices}
	for _, arg := range o.Listen {
		l, err := o.parseListener(arg)
		if err != nil {
			continue
		}
		p.Auth = append(p.Auth, modesByStrength[l.auth])
		if l.trusted {
			p.Trusted = append(p.Trusted, arg)
		}
	}
	return p
}

// protection of a client.
func (o *clientOptions) protection() protection {
	p := protection{Rules: ruleCount(o.NBDAccess), TLS: o.TLS, Auth: []string{o.Auth}, NBDTLS: o.NBDTLS, Confine: o.Confine}
	for _, l := range o.NBDListen {
		if strings.HasSuffix(l, trusted) {
			p.Trusted = append(p.Trusted, l)
		}
	}
	return p
}

// losses lists what next lacks of p.
func (p protection) losses(next protection) (lost []string) {
	add := func(format string, args ...any) { lost = append(lost, fmt.Sprintf(format, args...)) }
	if p.Rules > 0 && next.Rules < 0 {
		add("no file has access rules, and there were %d: write an empty list if there are to be none", p.Rules)
	}
	weaker := func(key, before, now string, strength []string) {
		if slices.Index(strength, now) < slices.Index(strength, before) {
			add("%s is %s, and was %s", key, now, before)
		}
	}
	weaker("tls", p.TLS, next.TLS, modesByStrength)
	weaker("nbd-tls", p.NBDTLS, next.NBDTLS, modesByStrength)
	weaker("confine", p.Confine, next.Confine, confineByStrength)
	weaker("auth of the weakest listener", weakest(p.Auth), weakest(next.Auth), modesByStrength)
	for _, l := range next.Trusted {
		if !slices.Contains(p.Trusted, l) {
			add("%s is trusted, and was not", l)
		}
	}
	for _, e := range next.Exports {
		if !slices.Contains(p.Exports, e) {
			add("block-devices has %s, and had not", e)
		}
	}
	return lost
}

// weakest returns the weakest mode; without any, nothing is weaker.
func weakest(modes []string) string {
	if len(modes) == 0 {
		return tlsRequire
	}
	return slices.MinFunc(modes, func(a, b string) int {
		return slices.Index(modesByStrength, a) - slices.Index(modesByStrength, b)
	})
}

// inheritedProtection returns the protection of the process that hands over to this one, nil
// if there is none, as of an older version, and takes it out of the environment.
func inheritedProtection() (*protection, error) {
	text := os.Getenv(envProtection)
	os.Unsetenv(envProtection)
	if text == "" {
		return nil, nil
	}
	p := &protection{}
	if err := json.Unmarshal([]byte(text), p); err != nil {
		return nil, fmt.Errorf("environment %s: %w", envProtection, err)
	}
	return p, nil
}

// refuseWeaker returns an error if next, of this process, has less than the process had
// that hands over.
func refuseWeaker(before *protection, next protection) error {
	if before == nil {
		return nil
	}
	if lost := before.losses(next); len(lost) > 0 {
		return fmt.Errorf("the configuration protects less than that of the running process: %s; correct it, or restart the daemon if that is meant: %w", strings.Join(lost, "; "), syscall.EPERM)
	}
	return nil
}

// protectionFile is the file with the protection of the last run, beside the control socket.
func protectionFile(socket string) string { return strings.TrimSuffix(socket, ".sock") + ".protection" }

// compareProtection warns if p is less than that of the last run, and notes p for the next
// one. A file that cannot be read or written costs the comparison only.
func compareProtection(socket string, p protection, log *slog.Logger) {
	file := protectionFile(socket)
	var last protection
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, &last)
	}
	if err == nil {
		for _, l := range last.losses(p) {
			log.Warn("the configuration protects less than that of the last run", "change", l)
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		log.Warn("the protection of the last run is not known", "file", file, "err", err)
	}
	if text, err = json.Marshal(p); err == nil {
		err = os.WriteFile(file, text, 0o600)
	}
	if err != nil {
		log.Warn("the protection of this run is not noted for the next one", "file", file, "err", err)
	}
}
