// Package redact takes secrets out of texts that are handed to others: keys,
// passwords and tokens in configuration files, logs and listings.
package redact

import (
	"bytes"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Removed stands where a secret was.
const Removed = "REMOVED"

const secretWord = `(?i:[\w.-]*(?:secret|passw|passphrase|psk|token|credential|private|api[_-]?key|auth[_-]?key|pre[_-]?shared|[_-]key\b|\bkey\b)[\w.-]*)`

var (
	secretName = regexp.MustCompile(`^` + secretWord + `$`)
	// assignment is NAME=VALUE, NAME: VALUE or "NAME":"VALUE".
	assignment = regexp.MustCompile(`(` + secretWord + `"?\s*[=:]\s*)("(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s"',;{}\[\]]+)`)
	pem        = regexp.MustCompile(`(?s)-----BEGIN [A-Z0-9 ]*-----.*?(?:-----END [A-Z0-9 ]*-----|\z)`)
	userInfo   = regexp.MustCompile(`(\w+://[^\s/@:]*:)[^\s/@]+@`)
	header     = regexp.MustCompile(`(?i)\b((?:bearer|basic) )[A-Za-z0-9+/=._~-]{8,}`)
	pskLine    = regexp.MustCompile(`(?m)^([^\s:#]{1,256}:)[0-9a-fA-F]{32,}\s*$`) // IDENTITY:HEX, as in PSK files of TLS
)

// Text takes secrets out of a text of any kind.
func Text(in []byte) []byte {
	out := pem.ReplaceAll(in, []byte(Removed))
	out = userInfo.ReplaceAll(out, []byte("${1}"+Removed+"@"))
	out = header.ReplaceAll(out, []byte("${1}"+Removed))
	out = pskLine.ReplaceAll(out, []byte("${1}"+Removed))
	return assignment.ReplaceAllFunc(out, func(m []byte) []byte {
		parts := assignment.FindSubmatch(m)
		value := strings.Trim(string(parts[2]), `"'`)
		if harmless(value) {
			return m
		}
		quote := ""
		if parts[2][0] == '"' || parts[2][0] == '\'' {
			quote = string(parts[2][:1])
		}
		return append(bytes.Clone(parts[1]), quote+Removed+quote...)
	})
}

// harmless reports whether value is no secret although its key has the name of
// one: the name of a file, or a word for off or on.
func harmless(value string) bool {
	switch value {
	case "", "true", "false", "null", "none", "auto", "off", "on", Removed:
		return true
	}
	return strings.HasPrefix(value, "/") && !strings.ContainsAny(value, "=+")
}

// YAML removes secrets from a configuration file: the whole value of a key with
// the name of a secret, on one line or several. If the file is no YAML, nothing
// of it is kept.
func YAML(in []byte) []byte {
	var doc yaml.Node
	if err := yaml.Unmarshal(in, &doc); err != nil {
		return []byte("# not readable as YAML, left out\n")
	}
	if doc.Kind == 0 {
		return nil
	}
	clean(&doc)
	out, err := yaml.Marshal(&doc)
	if err != nil {
		return []byte("# not writable as YAML, left out\n")
	}
	return Text(out)
}

func clean(n *yaml.Node) {
	n.HeadComment, n.LineComment, n.FootComment = "", "", "" // comments may contain secrets
	for i, child := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 1 && secretName.MatchString(n.Content[i-1].Value) && !(child.Kind == yaml.ScalarNode && harmless(child.Value)) {
			n.Content[i] = &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: Removed}
			continue
		}
		clean(child)
	}
}
